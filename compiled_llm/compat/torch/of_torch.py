"""The parts of torch that the package's table names, from wherever each stands."""

from __future__ import annotations

from torch._inductor.custom_graph_pass import (
    CustomGraphPass as CustomGraphPass,
)
from torch._inductor.custom_graph_pass import (
    get_hash_for_files as get_hash_for_files,
)

from compiled_llm.compat.torch.autotuning import (
    timed_in_a_graph as timed_in_a_graph,
)
from compiled_llm.compat.torch.capturing import (
    captured_into as captured_into,
)
from compiled_llm.compat.torch.capturing import (
    generator_of_its_own as generator_of_its_own,
)
from compiled_llm.compat.torch.cudagraph_trees import (
    adopt_cudagraph_trees as adopt_cudagraph_trees,
)
from compiled_llm.compat.torch.cudagraph_trees import (
    cudagraph_messages as cudagraph_messages,
)
from compiled_llm.compat.torch.cudagraph_trees import (
    cudagraph_skips as cudagraph_skips,
)
from compiled_llm.compat.torch.cudagraph_trees import (
    cudagraph_tree_graphs as cudagraph_tree_graphs,
)
from compiled_llm.compat.torch.cudagraph_trees import (
    prepare_cudagraph_trees as prepare_cudagraph_trees,
)
from compiled_llm.compat.torch.dynamo import (
    BackendError as BackendError,
)
from compiled_llm.compat.torch.dynamo import (
    CompiledGraph as CompiledGraph,
)
from compiled_llm.compat.torch.dynamo import (
    DynamoError as DynamoError,
)
from compiled_llm.compat.torch.dynamo import (
    RecompileLimitError as RecompileLimitError,
)
from compiled_llm.compat.torch.dynamo import (
    compiled_graphs as compiled_graphs,
)
from compiled_llm.compat.torch.dynamo import (
    compiled_with as compiled_with,
)
from compiled_llm.compat.torch.dynamo import (
    dynamo_watches as dynamo_watches,
)
from compiled_llm.compat.torch.dynamo import (
    forget as forget,
)
from compiled_llm.compat.torch.dynamo import (
    forget_entries_of as forget_entries_of,
)
from compiled_llm.compat.torch.dynamo import (
    forget_when_gone as forget_when_gone,
)
from compiled_llm.compat.torch.dynamo import (
    graph_breaks_logged as graph_breaks_logged,
)
from compiled_llm.compat.torch.dynamo import (
    graph_count as graph_count,
)
from compiled_llm.compat.torch.dynamo import (
    guards_for as guards_for,
)
from compiled_llm.compat.torch.dynamo import (
    is_compiled_for as is_compiled_for,
)
from compiled_llm.compat.torch.dynamo import (
    is_compiled_in_place as is_compiled_in_place,
)
from compiled_llm.compat.torch.dynamo import (
    no_bytecode_hooks as no_bytecode_hooks,
)
from compiled_llm.compat.torch.dynamo import (
    own_copy as own_copy,
)
from compiled_llm.compat.torch.dynamo import (
    reason_of as reason_of,
)
from compiled_llm.compat.torch.dynamo import (
    recompile_reasons as recompile_reasons,
)
from compiled_llm.compat.torch.dynamo import (
    traced_code as traced_code,
)
from compiled_llm.compat.torch.dynamo import (
    tracing_seconds as tracing_seconds,
)
from compiled_llm.compat.torch.inductor import (
    MAY_BEGIN_EARLY as MAY_BEGIN_EARLY,
)
from compiled_llm.compat.torch.inductor import (
    build_probes_early as build_probes_early,
)
from compiled_llm.compat.torch.inductor import (
    cache_variables as cache_variables,
)
from compiled_llm.compat.torch.inductor import (
    cannot_compile as cannot_compile,
)
from compiled_llm.compat.torch.inductor import (
    choose_ptxas as choose_ptxas,
)
from compiled_llm.compat.torch.inductor import (
    compile_with_inductor as compile_with_inductor,
)
from compiled_llm.compat.torch.inductor import (
    compiled_anew as compiled_anew,
)
from compiled_llm.compat.torch.inductor import (
    cpp_compiler as cpp_compiler,
)
from compiled_llm.compat.torch.inductor import (
    cpp_compilers as cpp_compilers,
)
from compiled_llm.compat.torch.inductor import (
    default_inductor_cache as default_inductor_cache,
)
from compiled_llm.compat.torch.inductor import (
    hash_sources_early as hash_sources_early,
)
from compiled_llm.compat.torch.inductor import (
    inductor_cache as inductor_cache,
)
from compiled_llm.compat.torch.inductor import (
    inductor_cache_at as inductor_cache_at,
)
from compiled_llm.compat.torch.inductor import (
    inductor_quiet as inductor_quiet,
)
from compiled_llm.compat.torch.inductor import (
    keep_probes_from_current_folder as keep_probes_from_current_folder,
)
from compiled_llm.compat.torch.inductor import (
    make_kernels_wait_first as make_kernels_wait_first,
)
from compiled_llm.compat.torch.inductor import (
    refusing_races as refusing_races,
)
from compiled_llm.compat.torch.inductor import (
    start_processes_early as start_processes_early,
)
from compiled_llm.compat.torch.inductor import (
    traced_by_inductor as traced_by_inductor,
)
from compiled_llm.compat.torch.inductor import (
    try_vector_instructions_early as try_vector_instructions_early,
)
from compiled_llm.compat.torch.inductor import (
    uncached_graphs as uncached_graphs,
)
from compiled_llm.compat.torch.inductor import (
    without_precompiled_headers as without_precompiled_headers,
)
from compiled_llm.compat.torch.modes import (
    hooks_on_all_modules as hooks_on_all_modules,
)
from compiled_llm.compat.torch.modes import (
    inside_torch_modes as inside_torch_modes,
)
from compiled_llm.compat.torch.modes import (
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
)
from compiled_llm.compat.torch.tensors import (
    example_of as example_of,
)
from compiled_llm.compat.torch.tensors import (
    fake_tensors as fake_tensors,
)
from compiled_llm.compat.torch.tensors import (
    inputs_by_tensor as inputs_by_tensor,
)
from compiled_llm.compat.torch.tensors import (
    note_examples as note_examples,
)
from compiled_llm.compat.torch.tensors import (
    running_on as running_on,
)
from compiled_llm.compat.torch.tensors import (
    stands_for_plain as stands_for_plain,
)
from compiled_llm.compat.torch.tensors import (
    storage_number as storage_number,
)
from compiled_llm.compat.torch.tensors import (
    storage_owners as storage_owners,
)
from compiled_llm.compat.torch.tensors import (
    unbacked_symbols as unbacked_symbols,
)
from compiled_llm.compat.torch.tensors import (
    version_of as version_of,
)
from compiled_llm.compat.torch.tensors import (
    wrapped_in as wrapped_in,
)
