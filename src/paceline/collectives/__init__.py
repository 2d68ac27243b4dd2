"""Groups of ranks and what they can do together.

Group.all_reduce(tensor)                  group.py: arguments, results, one call into the engine
  -> tensors.py                           a tensor or array as (address, count, dtype)
  -> _core.Group                          C++: shared memory on one host, TCP between hosts
endpoint.py, fabric.py                    a process's links; the processes that count as the job
memory.py                                 tensors in engine memory
torch_backend.py                          the same engine as torch.distributed's "paceline"
"""
