"""Private parts of torch that we depend on, one function each, and what we change for the whole process.

Those of transformers stand in ``compat.huggingface``, ``compat.tokenizers`` and ``compat.continuous_batching``, that of
xgrammar in ``compat.xgrammar``.

| what | for | ends when |
| --- | --- | --- |
| ``cudagraph_trees._initialize_tls`` / ``local`` | cudagraph trees on a thread of ours | torch < 2.13 is dropped |
| ``eval_frame.remove_from_cache`` | freeing a dropped model's graphs | Dynamo forgets code that nobody holds |
| ``eval_frame._debug_get_cache_entry_list`` | counting a function's graphs | torch reports them per function |
| ``eval_frame.get_eval_frame_callback`` | frames that the user's ``torch.compile`` gave up | ``is_compiling`` says it |
| ``Module._compiled_call_impl`` | noticing ``model.compile()`` | modules say it publicly |
| the entries' ``guard_manager.check`` | guards without a call | torch checks them for those who replay a graph |
| ``cudagraph_trees.get_container`` | counting recordings | torch reports them |
| the ``torch.__trace`` logger | collecting graph breaks | ``torch._dynamo.explain`` no longer resets Dynamo |
| the logger of ``cudagraph_utils`` | why CUDA graphs were skipped | torch reports it per function |
| ``torch._C._len_torch_function_stack``, ``…dispatch_stack`` | noticing modes | torch says it publicly |
| ``_get_current_function_mode_stack``, ``…dispatch_mode_stack``, ``DeviceContext`` | which modes | the same |
| ``_C._functorch.peek_interpreter_stack``, ``_C._get_tracing_state``, ``forward_ad._current_level`` | noticing \
transforms and tracing | the same |
| ``nn.modules.module._global_forward_hooks``, ``…pre_hooks`` | hooks on all modules | the same |
| ``exc.FailOnRecompileLimitHit`` | going on uncompiled | a function can be told to |
| ``exc.TorchDynamoException``, ``BackendCompilerFailed`` | naming the line that cannot be compiled | they are public |
| ``utils.get_traced_code`` | noticing that a class's method was replaced | Dynamo guards methods of classes |
| ``utils.get_compilation_metrics`` | why something recompiled | torch reports it per function |
| ``convert_frame._bytecode_hooks`` | explaining under depyf's hook | depyf's code always runs |
| Inductor's ``trace`` options, the logger of ``_inductor.debug`` | its code, kernels by node | an API gives them |
| ``custom_graph_pass`` of Inductor | a pass of ours in its graphs | torch documents it |
| ``torch._inductor.compile`` inside a backend | passes of ours, and pieces, before Inductor | torch documents it |
| ``TritonKernel._filter_pdl``, ``codegen_kernel`` | kernels that wait before they touch memory | Inductor's always do |
| ``torch._dispatch.python`` | running a graph on symbolic sizes | torch propagates a graph's sizes in public |
| ``example_value`` and ``FakeTensor.fake_mode`` | which parameter a graph input is; caching a piece | a graph says it |
| ``UntypedStorage._cdata`` | which fake tensors share memory | fake tensors have addresses |
| ``torch._C._storage_Use_Count`` | whether a weight's memory is nobody else's | storages say it |
| ``Tensor._version`` | what was written to | tensors say it publicly |
| ``symbolic_shapes.free_unbacked_symbols`` | numbers that only the device knows | a graph says it |
| ``torch._inductor.config.cpp.cxx`` | which C++ compilers Inductor looks for | torch reports it |
| ``_subclasses.FakeTensorMode``, ``utils._pytree`` | running a model without computing | torch documents it |
| ``cpp_builder``, ``cache_dir_utils`` of Inductor | what ``doctor`` shows | torch reports it |
| the counters of ``fxgraph_cache_…`` | whether code came from Inductor's cache | torch reports it |
| the names of functions in ``async_compile``, ``graph``, ``compile_fx`` and ``triton_heuristics`` of Inductor | what \
takes so long | torch tells how far it is |
| ``cpu_vec_isa.VecISA._avx_py_load`` | running nothing of the current folder | torch's probes leave it out |
| ``torch.cuda._is_in_bad_fork`` | refusing calls in a forked process, where CUDA never works | torch says it publicly |
| ``_C._profiler._ExperimentalConfig`` | profiling all threads | ``torch.profiler.profile`` takes it by name |

Public in spite of the underscore, and used anywhere: ``torch._dynamo.config``, ``mark_dynamic``,
``mark_static_address`` and ``reset``, which torch's manual teaches; ``torch._ops.OpOverload``, the type of an op; and
the dictionaries of ``nn.Module`` (``_parameters``, ``_buffers``, ``_modules``, ``_forward_hooks``,
``_forward_pre_hooks``), which have been the same since modules exist and are read in every call.

Changed for the whole process:

| what | by | ends when |
| --- | --- | --- |
| the two methods of ``TritonKernel`` above | the first graph that is compiled | Inductor's kernels always wait first |
| what a forked process begins with (``os.register_at_fork``) | the import | threads survive a fork |
| ``VecISA._avx_py_load`` | the first graph that is compiled | torch's probes leave out the current folder |
| ``KINETO_LOG_LEVEL`` and two variables of CUPTI, if unset | the first profile | CUPTI can restart |
"""

from __future__ import annotations

from torch._inductor.custom_graph_pass import (
    CustomGraphPass as CustomGraphPass,
)
from torch._inductor.custom_graph_pass import (
    get_hash_for_files as get_hash_for_files,
)

from compiled_llm.compat.cudagraph_trees import (
    adopt_cudagraph_trees as adopt_cudagraph_trees,
)
from compiled_llm.compat.cudagraph_trees import (
    cudagraph_messages as cudagraph_messages,
)
from compiled_llm.compat.cudagraph_trees import (
    cudagraph_recordings as cudagraph_recordings,
)
from compiled_llm.compat.cudagraph_trees import (
    cudagraph_skips as cudagraph_skips,
)
from compiled_llm.compat.cudagraph_trees import (
    prepare_cudagraph_trees as prepare_cudagraph_trees,
)
from compiled_llm.compat.dynamo import (
    BackendError as BackendError,
)
from compiled_llm.compat.dynamo import (
    CompiledGraph as CompiledGraph,
)
from compiled_llm.compat.dynamo import (
    DynamoError as DynamoError,
)
from compiled_llm.compat.dynamo import (
    RecompileLimitError as RecompileLimitError,
)
from compiled_llm.compat.dynamo import (
    compiled_graphs as compiled_graphs,
)
from compiled_llm.compat.dynamo import (
    compiled_with as compiled_with,
)
from compiled_llm.compat.dynamo import (
    dynamo_watches as dynamo_watches,
)
from compiled_llm.compat.dynamo import (
    forget as forget,
)
from compiled_llm.compat.dynamo import (
    forget_entries_of as forget_entries_of,
)
from compiled_llm.compat.dynamo import (
    forget_when_gone as forget_when_gone,
)
from compiled_llm.compat.dynamo import (
    graph_breaks_logged as graph_breaks_logged,
)
from compiled_llm.compat.dynamo import (
    graph_count as graph_count,
)
from compiled_llm.compat.dynamo import (
    guards_for as guards_for,
)
from compiled_llm.compat.dynamo import (
    is_compiled_for as is_compiled_for,
)
from compiled_llm.compat.dynamo import (
    is_compiled_in_place as is_compiled_in_place,
)
from compiled_llm.compat.dynamo import (
    no_bytecode_hooks as no_bytecode_hooks,
)
from compiled_llm.compat.dynamo import (
    own_copy as own_copy,
)
from compiled_llm.compat.dynamo import (
    recompile_reasons as recompile_reasons,
)
from compiled_llm.compat.dynamo import (
    traced_code as traced_code,
)
from compiled_llm.compat.inductor import (
    MAY_BEGIN_EARLY as MAY_BEGIN_EARLY,
)
from compiled_llm.compat.inductor import (
    build_probes_early as build_probes_early,
)
from compiled_llm.compat.inductor import (
    compile_with_inductor as compile_with_inductor,
)
from compiled_llm.compat.inductor import (
    compiled_anew as compiled_anew,
)
from compiled_llm.compat.inductor import (
    cpp_compiler as cpp_compiler,
)
from compiled_llm.compat.inductor import (
    cpp_compilers as cpp_compilers,
)
from compiled_llm.compat.inductor import (
    default_inductor_cache as default_inductor_cache,
)
from compiled_llm.compat.inductor import (
    inductor_cache as inductor_cache,
)
from compiled_llm.compat.inductor import (
    inductor_quiet as inductor_quiet,
)
from compiled_llm.compat.inductor import (
    keep_probes_from_current_folder as keep_probes_from_current_folder,
)
from compiled_llm.compat.inductor import (
    make_kernels_wait_first as make_kernels_wait_first,
)
from compiled_llm.compat.inductor import (
    refusing_races as refusing_races,
)
from compiled_llm.compat.inductor import (
    traced_by_inductor as traced_by_inductor,
)
from compiled_llm.compat.modes import (
    hooks_on_all_modules as hooks_on_all_modules,
)
from compiled_llm.compat.modes import (
    inside_torch_modes as inside_torch_modes,
)
from compiled_llm.compat.modes import (
    observer_of_operations as observer_of_operations,
)
from compiled_llm.compat.profiler import (
    profiling_all_threads as profiling_all_threads,
)
from compiled_llm.compat.stages import (
    compiling_stage as compiling_stage,
)
from compiled_llm.compat.tensors import (
    example_of as example_of,
)
from compiled_llm.compat.tensors import (
    fake_tensors as fake_tensors,
)
from compiled_llm.compat.tensors import (
    inputs_by_tensor as inputs_by_tensor,
)
from compiled_llm.compat.tensors import (
    note_examples as note_examples,
)
from compiled_llm.compat.tensors import (
    running_on as running_on,
)
from compiled_llm.compat.tensors import (
    stands_for_plain as stands_for_plain,
)
from compiled_llm.compat.tensors import (
    storage_number as storage_number,
)
from compiled_llm.compat.tensors import (
    storage_owners as storage_owners,
)
from compiled_llm.compat.tensors import (
    unbacked_symbols as unbacked_symbols,
)
from compiled_llm.compat.tensors import (
    version_of as version_of,
)
