"""The GPU backend: models of Llama's shape, with fused weights, Triton kernels and CUDA graphs.

Start with `runner`. `weights` joins the model's matrices; `decoder` is the forward pass, over the operations of `triton_ops`,
or those of `ops`, in plain torch; `pipeline` runs decode steps, one ahead of what the host has seen, over the buffers of
`step_input` and the CUDA graphs of `replay`; `memory` sizes the KV pool. All but the kernels runs on a CPU as well,
which is how it is tested.
"""
