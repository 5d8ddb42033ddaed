"""How the bytes of a segment cross: shm, tcp, nccl, cuda_ipc.

Start with `transport`, the interface; `registry` lists what there is.
"""
