"""The parts of torch that the package's table names, from wherever each stands."""

from __future__ import annotations

from torch._inductor.custom_graph_pass import (
    CustomGraphPass as CustomGraphPass,
    get_hash_for_files as get_hash_for_files,
)

from compiled_llm.compat.torch.autotuning import (
    timed_in_a_graph as timed_in_a_graph,
)
from compiled_llm.compat.torch.capturing import (
    captured_into as captured_into,
    generator_of_its_own as generator_of_its_own,
)
from compiled_llm.compat.torch.cudagraph_trees import (
    adopt_cudagraph_trees as adopt_cudagraph_trees,
    cudagraph_messages as cudagraph_messages,
    cudagraph_skips as cudagraph_skips,
    cudagraph_tree_graphs as cudagraph_tree_graphs,
    prepare_cudagraph_trees as prepare_cudagraph_trees,
)
from compiled_llm.compat.torch.dynamo import (
    BackendError as BackendError,
    CompiledGraph as CompiledGraph,
    DynamoError as DynamoError,
    RecompileLimitError as RecompileLimitError,
    compiled_graphs as compiled_graphs,
    compiled_with as compiled_with,
    dynamo_watches as dynamo_watches,
    forget as forget,
    forget_entries_of as forget_entries_of,
    forget_when_gone as forget_when_gone,
    graph_breaks_logged as graph_breaks_logged,
    graph_count as graph_count,
    guards_for as guards_for,
    is_compiled_for as is_compiled_for,
    is_compiled_in_place as is_compiled_in_place,
    no_bytecode_hooks as no_bytecode_hooks,
    own_copy as own_copy,
    reason_of as reason_of,
    recompile_reasons as recompile_reasons,
    traced_code as traced_code,
    tracing_seconds as tracing_seconds,
)
from compiled_llm.compat.torch.inductor import (
    MAY_BEGIN_EARLY as MAY_BEGIN_EARLY,
    build_probes_early as build_probes_early,
    cache_variables as cache_variables,
    cannot_compile as cannot_compile,
    choose_ptxas as choose_ptxas,
    compile_with_inductor as compile_with_inductor,
    compiled_anew as compiled_anew,
    cpp_compiler as cpp_compiler,
    cpp_compilers as cpp_compilers,
    default_inductor_cache as default_inductor_cache,
    hash_sources_early as hash_sources_early,
    inductor_cache as inductor_cache,
    inductor_cache_at as inductor_cache_at,
    inductor_quiet as inductor_quiet,
    keep_probes_from_current_folder as keep_probes_from_current_folder,
    make_kernels_wait_first as make_kernels_wait_first,
    refusing_races as refusing_races,
    start_processes_early as start_processes_early,
    traced_by_inductor as traced_by_inductor,
    try_vector_instructions_early as try_vector_instructions_early,
    uncached_graphs as uncached_graphs,
    without_precompiled_headers as without_precompiled_headers,
)
from compiled_llm.compat.torch.modes import (
    hooks_on_all_modules as hooks_on_all_modules,
    inside_torch_modes as inside_torch_modes,
    observer_of_operations as observer_of_operations,
)
from compiled_llm.compat.torch.profiler import (
    profiling_all_threads as profiling_all_threads,
)
from compiled_llm.compat.torch.stages import (
    compiling_stage as compiling_stage,
)
from compiled_llm.compat.torch.tensors import (
    Fakes as Fakes,
    example_of as example_of,
    fake_tensors as fake_tensors,
    inputs_by_tensor as inputs_by_tensor,
    note_examples as note_examples,
    running_on as running_on,
    stands_for_plain as stands_for_plain,
    storage_number as storage_number,
    storage_owners as storage_owners,
    unbacked_symbols as unbacked_symbols,
    version_of as version_of,
    wrapped_in as wrapped_in,
)
