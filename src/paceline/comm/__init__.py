"""Communication: groups of ranks and their collectives, engine memory, torch.distributed backend.

    group.py                Group.all_reduce(tensor): arguments, results, one call into the engine
    engine_calls.py         how a group calls the engine; an all-reduce that is prepared once
    tensors.py              a tensor or array as address, count and dtype
    _core.Group             C++: shared memory on one host, TCP between hosts
    endpoint.py, fabric.py  this process's connections, and the processes that count as the job
    shared_memory.py        tensors in engine memory
    devices.py              accelerators: the device of this process, pinned memory, their backends
    device_route.py         copies between a device and host memory, ordered by events
    host_route.py           trips of gradients through engine memory that the device reaches
    device_group.py         the device's own collectives (NCCL), in a group beside ours
    device_staging.py       tensors on a device in the operations of a group
    device_timing.py        times of a device, by events
    object_collectives.py   all_gather_object, broadcast_object
    torch/                  the same engine as torch.distributed's backend "paceline"

Start with group.py. Imports control/; used by everything that trains.
"""
