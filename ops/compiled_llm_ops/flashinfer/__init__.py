"""FlashInfer behind our ops, and the only folder that uses it: plan on the host, launch in a graph, append to pages.

Our own decode kernel needs neither a plan nor FlashInfer: see ``compiled_llm_ops.attention.decode``. Decode steps that
FlashInfer computes are extends of one token a row.

FlashInfer's planner reads lengths on the host, writes its plan into a pinned buffer, and copies that to the device with
one ``cudaMemcpyAsync`` on the current stream. The public ``plan()`` around it copies the page table as well and waits
for the device, so it runs once for each geometry, to build or load the kernels; each batch after that goes to the
planner directly. The public ``run()`` launches.

What is private to FlashInfer and used here (``tests/ops/test_flashinfer_contract.py`` checks all of it):

=============================================  ==============================  ========================================
name                                           what for                        ends when
=============================================  ==============================  ========================================
``wrapper._cached_module.plan``, the order of  plan without copying the page   FlashInfer plans from host arrays without
its arguments                                  table and without waiting       a copy
``wrapper._plan_info``,                        hand ``run()`` what was         the same
``wrapper._qo_indptr_last``                    planned, and for how many
                                               tokens
``padded_batch_size`` in it, lowered           launch no blocks without work   the planner counts tiles if it
                                               in a graph                      does not split
``wrapper._int_workspace_buffer``,             one wrapper serves many plans,  the same
``wrapper._float_workspace_buffer``            each with the tensors that its
                                               launch was given
``wrapper._qo_indptr_buf``,                    let ``run()`` read the page     ``run()`` takes the page table
``wrapper._paged_kv_indptr_buf``,              table in place
``wrapper._paged_kv_indices_buf``,
``wrapper._paged_kv_last_page_len_buf``
the order of the numbers in ``_plan_info``     name what changed under a       the numbers have names
                                               captured graph
``wrapper._sm_scale``,                         the same for MLA; layers        ``run()`` takes them
``wrapper._kv_indices_buf``                    of several scales share a plan
``utils._get_cache_alibi_slopes_buf``          make the tensor that ``run()``  ``run()`` makes no tensor for
                                               would make during a capture     ``pos_encoding_mode="NONE"``
``jit.core.JitSpec.build_and_load``, ``load``  load kernels that another       a folder of built kernels can
                                               process has built, and count    be named
                                               those that are built here
the text of "Buffer overflow when allocating"  say what to do about a full     0.6 is no longer supported
                                               workspace                       (``workspace_size()`` exists in 0.7)
=============================================  ==============================  ========================================

Shapes: B rows, T packed tokens, H query heads, K kv heads, D head dimension (padded), P pages, S page size.
"""
