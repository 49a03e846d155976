"""Private parts of torch that we depend on, one function each, and what we change for the whole process.

The functions stand in the modules of ``compat.torch``. Those of transformers stand in ``compat.huggingface``,
``compat.tokenizers`` and ``compat.continuous_batching``, that of xgrammar in ``compat.xgrammar``, that of Triton
(``knobs.cache.manager_class`` and its ``FileCacheManager``) in ``compat.torch.triton``.

| what | for | ends when |
| --- | --- | --- |
| ``cudagraph_trees._initialize_tls`` / ``local`` | cudagraph trees on a thread of ours | torch < 2.13 is dropped |
| ``eval_frame.remove_from_cache`` | freeing a dropped model's graphs | Dynamo forgets code that nothing holds |
| ``eval_frame.cached_backends`` | freeing what a dropped model's backend refers to | Dynamo forgets backends, too |
| ``eval_frame._debug_get_cache_entry_list`` | counting a function's graphs | torch reports them per function |
| ``eval_frame.get_eval_frame_callback`` | frames that the user's ``torch.compile`` gave up | ``is_compiling`` says it |
| ``convert_frame.compile_lock`` | compiling while no other thread does | torch compiles in several threads |
| ``fx._symbolic_trace.is_fx_symbolic_tracing`` | compiling while another thread traces | ``torch.compile`` asks its \
own thread |
| ``_guards.TracingContext.try_get`` | whether an export of this thread traces | ``is_exporting`` is a thread's |
| ``eval_frame._stance`` | running uncompiled where ``torch.compiler.set_stance`` says so | torch says it publicly |
| ``Module._compiled_call_impl``, ``_call_impl`` | noticing ``model.compile()``, and calls of a module inside | \
modules say it publicly |
| the entries' ``guard_manager.check``, ``check_verbose`` and ``code`` | guards without a call, and code without \
``torch.compile``'s wrapper, which asks flags of the process | torch checks them for those who replay a graph |
| ``cudagraph_trees.get_container`` | counting CUDA graphs | torch reports them |
| ``torch._C._cuda_endAllocateToPool``, ``_cuda_releasePool`` | going on after a capture that failed | \
``capture_end`` tells the allocator first |
| ``torch._C._cuda_beginAllocateCurrentThreadToPool``, ``_cuda_getCurrentRawStream`` | drawing and replaying while \
another thread captures | torch < 2.12 is dropped |
| the ``torch.__trace`` logger | collecting graph breaks | ``torch._dynamo.explain`` no longer resets Dynamo |
| the logger of ``cudagraph_utils`` | why CUDA graphs were skipped | torch reports it per function |
| ``torch._C._len_torch_function_stack``, ``…dispatch_stack`` | noticing modes | torch says it publicly |
| ``_get_current_function_mode_stack``, ``…dispatch_mode_stack``, ``DeviceContext`` | which modes | the same |
| ``_C._functorch.peek_interpreter_stack``, ``_C._get_tracing_state``, ``forward_ad._current_level`` | noticing \
transforms and tracing | the same |
| ``nn.modules.module._global_forward_hooks``, ``…backward_hooks``, ``…pre_hooks`` | hooks on all modules | the same |
| ``utils.hooks.RemovableHandle.next_id`` | looking for hooks for gradients only once there may be one | the same |
| ``exc.FailOnRecompileLimitHit`` | going on uncompiled | a function can be told to |
| ``exc.TorchDynamoException``, ``BackendCompilerFailed`` | naming the line that cannot be compiled | they are public |
| ``utils.get_traced_code`` | noticing that a class's method was replaced | Dynamo guards methods of classes |
| ``utils.get_compilation_metrics`` | why something recompiled, how long tracing took | torch reports it per function |
| ``convert_frame._bytecode_hooks`` | explaining under depyf's hook | depyf's code always runs |
| Inductor's ``trace`` options, the logger of ``_inductor.debug`` | its code, kernels by node | an API gives them |
| ``custom_graph_pass`` of Inductor | a pass of ours in its graphs | torch documents it |
| ``torch._inductor.compile`` inside a backend | passes of ours, and pieces, before Inductor | torch documents it |
| ``TritonKernel._filter_pdl``, ``codegen_kernel`` | kernels that wait before they touch memory | Inductor's always do |
| ``MissingOperatorWithDecomp``, ``…WithoutDecomp.operator_str`` | describing ops only if a log is read | \
torch < 2.13 is dropped |
| ``CachingAutotuner.bench``, ``clone_args`` | tilings that are timed as they run | Inductor times them in graphs |
| ``runtime.benchmarking`` of Inductor | capturing nothing while it waits for the device | it waits for a stream |
| ``torch._dispatch.python`` | running a graph on symbolic sizes | torch propagates a graph's sizes in public |
| ``example_value`` and ``FakeTensor.fake_mode`` | which parameter a graph input is; caching a piece | a graph says it |
| ``utils._mode_utils.no_dispatch`` | fake tensors ten times as fast | torch makes them as fast |
| ``UntypedStorage._cdata`` | which fake tensors share memory | fake tensors have addresses |
| ``torch._C._storage_Use_Count`` | whether only a weight holds its memory | storages say it |
| ``_python_dispatch.is_traceable_wrapper_subclass`` | what quantised weights are made of | torch says it publicly |
| ``Tensor._version`` | what was written to | tensors say it publicly |
| ``torch._foreach_copy_`` | copying an adapter in one launch | it is public |
| ``symbolic_shapes.free_unbacked_symbols`` | numbers that only the device knows | a graph says it |
| ``torch._inductor.config.cpp.cxx`` | which C++ compilers Inductor looks for | torch reports it |
| ``_subclasses.FakeTensorMode``, ``utils._pytree`` | running a model without computing | torch documents it |
| ``FakeTensorMode.__torch_dispatch__`` | trying weights of a subclass of ``Parameter`` | torch < 2.13 is dropped |
| ``FakeTensorMode.cache_enabled`` | trying packed weights of ``torch.ao`` twice | torch compares or skips them |
| ``cpp_builder``, ``cache_dir_utils`` of Inductor | what ``doctor`` shows | torch reports it |
| the counters of ``fxgraph_cache_…`` and ``autograd_cache_bypass`` | whether code came from Inductor's cache, and can \
be kept there | torch reports it |
| ``TORCHINDUCTOR_CACHE_DIR`` is read again by each compile | code from a folder of artifacts | Inductor takes its \
cache as an option |
| the names of functions in ``async_compile``, ``graph``, ``compile_fx`` and ``triton_heuristics`` of Inductor | what \
takes so long | torch tells how far it is |
| ``cpu_vec_isa.VecISA._avx_py_load`` | running nothing of the current folder | torch's probes leave it out |
| ``compile_tasks._set_triton_ptxas_path`` | one key for each kernel of Triton's | Inductor sets it at once |
| ``CachingAutotuner.launchers``, ``.configs`` and ``.inductor_meta``, ``cache_hash`` and ``config`` of a launcher, \
``compile_tasks._reload_python_module``, ``_set_triton_libdevice_path`` | kernels of kept programs, with the tilings \
that they ran with | torch keeps which kernels a code file launches |
| ``async_compile.maybe_warm_pool`` | building the first kernels in several processes | any backend starts them early |
| ``codecache._precompile_header`` | loading C++ kernels without a compiler | Inductor looks for a kernel first |
| ``exc.CppCompileError`` | telling a kernel that is missing | the same |
| ``cpp_builder.run_compile_cmd`` | compilers that Ctrl-C does not end | Inductor keeps it from those of other threads |
| ``codecache.torch_key``, ``triton_compat.triton_key``, ``cpu_vec_isa.pick_vec_isa`` | finding graphs sooner | \
Inductor needs less before it looks for one |
| ``torch.cuda._is_in_bad_fork`` | refusing calls in a forked process, where CUDA never works | torch says it publicly |
| ``_C._profiler._ExperimentalConfig`` | profiling all threads | ``torch.profiler.profile`` takes it by name |
| ``autograd.profiler._is_profiler_enabled`` | calling ops by the names that a profile has | torch says it publicly |

Public in spite of the underscore, and used anywhere: ``torch._dynamo.config``, ``mark_dynamic``,
``mark_static_address`` and ``reset``, which torch's manual teaches; ``torch._ops.OpOverload``, the type of an op; and
the dictionaries of ``nn.Module`` (``_parameters``, ``_buffers``, ``_modules``, ``_forward_hooks``,
``_forward_pre_hooks``, ``_backward_hooks``, ``_backward_pre_hooks``), which are the same in all versions that we take
and are read in every call, those for gradients if a hook has come since.

Changed for the whole process:

| what | by | ends when |
| --- | --- | --- |
| the two methods of ``TritonKernel`` above | the first graph that is compiled | Inductor's kernels always wait first |
| ``operator_str`` of ops without a lowering, which describes them only if a log is read | the first graph that is \
compiled | torch < 2.13 is dropped |
| ``CachingAutotuner.bench`` | the first graph that is compiled | Inductor times kernels in graphs |
| ``benchmark_gpu`` and ``benchmark_gpu_with_cuda_graph`` of Inductor, on CUDA | the first graph that is \
compiled | Inductor's timing waits for a stream |
| ``is_fx_symbolic_tracing``, while a program is handed to ``torch.compile`` | each program | ``torch.compile`` asks \
its own thread |
| what a forked process begins with (``os.register_at_fork``), where our locks are free (``RLock._at_fork_reinit``) | \
the import | threads survive a fork |
| ``VecISA._avx_py_load`` | the first graph that is compiled | torch's probes leave out the current folder |
| ``cpp_builder.run_compile_cmd`` | the first graph that is compiled | Inductor keeps Ctrl-C from its compilers |
| ``TORCHINDUCTOR_CACHE_DIR``, ``TRITON_CACHE_DIR`` and on a CPU ``PATH``, while a graph is taken from artifacts | \
each such graph | Inductor takes its cache as an option, and looks there without a compiler |
| ``codecache._precompile_header``, while a graph is taken from artifacts | each such graph | Inductor looks for a \
kernel first |
| ``TRITON_PTXAS_PATH``, if unset and torch brings a ptxas, as Inductor itself does sooner or later | the first model \
on CUDA in a mode that compiles | Inductor sets it at once |
| ``TRITON_CACHE_DIR``, if unset, as Inductor itself does sooner or later | the first model on CUDA whose programs are \
kept | Inductor sets it at once |
| ``triton.knobs.cache.manager_class`` | the first artifacts or kept programs that hold kernels of Triton | Triton \
looks in several folders |
| ``JitSpec.build_and_load`` of FlashInfer | the first artifacts that hold kernels of FlashInfer | a folder of \
built kernels can be named |
| ``random.setstate``, ``torch.random.set_rng_state``, ``torch.cuda.set_rng_state``, ``torch.set_default_dtype``, \
``use_deterministic_algorithms`` and ``_C._set_fp32_precision_setter``, while a thread of ours compiles, for that \
thread alone | each such thread | Dynamo does not put back what others have drawn and set |
| ``KINETO_LOG_LEVEL`` and two variables of CUPTI, if unset | the first profile | CUPTI can restart |
"""
