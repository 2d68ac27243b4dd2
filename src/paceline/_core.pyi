"""Types of the C++ extension."""

from collections.abc import Sequence
from typing import Any

DTYPES: tuple[str, ...]
OPS: tuple[str, ...]
KINDS: tuple[str, ...]
CIPHERS: tuple[str, ...]

# The faster of CIPHERS on this CPU; UsageError if this process has no libcrypto.
def preferred_cipher() -> str: ...

# The library that encrypts data between hosts, and why not a faster one.
def cipher_library() -> str: ...

# A file of links that are emulated between the processes of one machine; see emulation/links.h.
def create_emulated_links(
    path: str, num_hosts: int, bytes_per_s: float, latency_s: float
) -> None: ...

# Number of hosts, bytes per second, latency.
def read_emulated_links(path: str) -> tuple[int, float, float]: ...

Parts = Sequence[tuple[int, int]]

def crc32c(data: bytes, crc: int = 0) -> int: ...
def kernel_name() -> str: ...
def keep_freed_memory() -> bool: ...
def use_portable_kernels(on: bool) -> None: ...

# The mean of the tensors at these addresses, with the bits of an all-reduce on one host.
def reduce_mean(inputs: Sequence[int], output: int, count: int, dtype: int) -> None: ...
def copy_past_cache(source: int, target: int, nbytes: int) -> None: ...

# float32 to float16 or bfloat16; element i draws the random bits number first + i of the seed.
def round_stochastic(
    source: int, target: int, count: int, dtype: int, seed: int, first: int = 0
) -> None: ...

# Seed, step, index of the first element.
Draw = tuple[int, int, int]

# Signs of float32 or float64 as bits, 64 in a word (reduce/bits.h).
def pack_signs(values: int, count: int, dtype: int, coin: Draw, bits: int, words: int) -> None: ...

# The same for the updated momentum: keep * momentum + (1 - keep) * values.
def pack_tracked(
    values: int,
    momentum: int,
    keep: float,
    count: int,
    dtype: int,
    coin: Draw,
    bits: int,
    words: int,
) -> None: ...

# The same for the updated voted: values + (voted - scale * sign(voted)). A momentum (0: none) is
# updated and replaces the values. Returns the sum of magnitudes, and how many have a sign.
def pack_corrected(
    values: int,
    momentum: int,
    keep: float,
    voted: int,
    scale: float,
    count: int,
    dtype: int,
    coin: Draw,
    bits: int,
    words: int,
) -> tuple[float, int]: ...
def majority(rows: Sequence[int], words: int, coin: Draw, bits: int) -> None: ...
def unpack_signs(
    bits: int, words: int, count: int, dtype: int, scale: float, values: int
) -> None: ...

# Block formats (codec/format.h): name, values and bytes of a block.
BLOCK_FORMATS: tuple[tuple[str, int, int], ...]

# Addresses; a residual may be 0 for none. A draw is seed, step, index of the first element.
def encode_blocks(
    format: int, values: int, residual: int, count: int, draw: Draw, payload: int
) -> None: ...
def mean_of_blocks(format: int, rows: Sequence[int], count: int, out: int) -> None: ...
def recode_blocks(
    format: int, rows: Sequence[int], residual: int, count: int, draw: Draw, payload: int
) -> None: ...
def block_largest(values: int, residual: int, count: int, largest: int) -> None: ...
def encode_shared(
    values: int, residual: int, count: int, largest: int, levels: int, to: int
) -> None: ...
def decode_shared(
    source: int, count: int, largest: int, levels: int, workers: int, out: int
) -> None: ...

# Sparse tensors; a row is addresses of indices and values, and how many.
def select(
    values: int,
    residual: int,
    count: int,
    k: int,
    draw: Draw,
    num_threads: int,
    indices: int,
    chosen: int,
) -> None: ...
def check_rows(rows: Sequence[tuple[int, int, int]], count: int) -> None: ...
def scatter_mean(rows: Sequence[tuple[int, int, int]], begin: int, end: int, out: int) -> None: ...
def pack_gaps(indices: int, k: int, count: int, width: int, to: int) -> int: ...
def unpack_gaps(
    source: int, num_bytes: int, k: int, count: int, width: int, indices: int
) -> None: ...
def random_indices(count: int, k: int, draw: Draw, begin: int, end: int, indices: int) -> None: ...

# torch's types, of which `reads_tensor` and `all_reduce_tensor` take tensors. False if this torch
# does not export them.
def use_tensor_types(tensor: type, parameter: type) -> bool: ...

# Whether it is a contiguous CPU tensor of one of these types, with a dtype of the engine.
def reads_tensor(tensor: object | None) -> bool: ...

# Copies the gradient of each contiguous parameter to its place (an address, and how many elements).
# Returns the numbers of those that were not copied: no plain tensor of that size and dtype.
def copy_gradients(
    parameters: list[Any], places: Sequence[int], counts: Sequence[int], dtype: int
) -> list[int]: ...

class Work:
    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> None: ...
    def error(self) -> Exception | None: ...
    def source(self) -> int: ...
    # Of a named operation: elements from each member, the memory, the member that joined last.
    def counts(self) -> list[int]: ...
    def output(self) -> Any: ...  # a numpy array of bytes
    def last_joined(self) -> int: ...

# The lowest index of a work that has finished or failed; -1 after the timeout.
def wait_any(works: Sequence[Work], timeout_s: float | None = None) -> int: ...

# For many pending works, of which few finish at a time.
class Completions:
    def __init__(self, engine: Engine) -> None: ...
    # Adds a work, once; `wait` returns the number when it has finished or failed.
    def add(self, work: Work, number: int) -> None: ...
    # Waits until an added work has finished, or one of these, or until the timeout. Takes numbers.
    def wait(self, works: Sequence[Work] = (), timeout_s: float | None = None) -> list[int]: ...

class Engine:
    def __init__(
        self,
        rank: int,
        num_local: int,
        timeout_s: float,
        liveness_s: float,
        warn_s: float,
        links: str = "",
        remote_s: float = 0.0,  # liveness_s for peers on other hosts; 0: the same
    ) -> None: ...
    def add_local_peer(self, rank: int, fd: int) -> None: ...
    # Waits for the named ranks, or for all if none is named.
    def await_local_peers(self, timeout_s: float, ranks: Sequence[int] = []) -> None: ...
    # The hub of a host introduces its neighbours to each other, which wait for that: False if some
    # of these ranks are missing after the time.
    def introduce_neighbours(self, timeout_s: float) -> None: ...
    def await_introductions(self, hub: int, ranks: Sequence[int], timeout_s: float) -> bool: ...
    def set_num_local(self, num_local: int) -> None: ...
    # Kills a neighbour's process and waits until it is gone; False if it was gone before.
    def end_peer(self, rank: int) -> bool: ...
    # Releases the resources of a neighbour that is gone; views of its memory stay.
    def forget_peer(self, rank: int) -> None: ...
    def allocate(self, nbytes: int, apart: bool = False) -> Any: ...
    def locate(self, address: int, nbytes: int) -> tuple[int, int]: ...
    def private_view(self, rank: int, segment: int, offset: int, nbytes: int) -> PrivateView: ...
    # From byte `at` on the view shows this memory, instead of what it shows there.
    def show_in(
        self, view: PrivateView, at: int, rank: int, segment: int, offset: int, nbytes: int
    ) -> None: ...
    def memory_of_peer(self, rank: int, segment: int, offset: int, nbytes: int) -> Any: ...
    # Bytes of payload that this process has sent: on this host, and over the network.
    def bytes_sent(self) -> tuple[int, int]: ...
    # Channels to other hosts that lazy groups need: group, generation, rank, lane. The descriptor
    # is readable when there are some.
    def channel_requests_fd(self) -> int: ...
    def take_channel_requests(self) -> list[tuple[int, int, int, int]]: ...
    # Operations that have waited long: description, seconds, ranks that they wait for.
    def long_waits(self) -> list[tuple[str, float, list[int]]]: ...
    # Counts bytes that other processes read here without a message or a collective: named in a
    # request to a server.
    def count_sent(self, nbytes: int) -> None: ...
    def say_goodbye(self) -> None: ...
    def close_after_fork(self) -> None: ...

class PrivateView:
    def memory(self) -> Any: ...
    def changed(self) -> bool: ...
    def discard(self) -> None: ...

class ReadyHook:
    """The hook of a small parameter: its gradient is ready. Called with the parameter."""

    def __init__(
        self, slot: object, on_ready: object, on_full: object, streams: object | None
    ) -> None: ...

class Group:
    def __init__(
        self,
        engine: Engine,
        id: int,
        generation: int,
        ranks: Sequence[int],
        hosts: Sequence[int],
        timeout_s: float,
        forming_s: float = 0,  # then PeerTimeout; the caller may try again
        is_lazy: bool = False,  # channels to other hosts are requested when they are needed
    ) -> None: ...
    def close(self) -> None: ...
    # Ends pending and later operations on all members, with PeerLost if a rank is named, else with
    # GenerationChanged. From any thread.
    def fail(self, text: str, lost: int | None = None) -> None: ...
    def failed(self) -> bool: ...
    # Takes over the descriptor. Keys: number of the cipher in CIPHERS, key to send, key to receive.
    def add_channel(
        self, member: int, lane: int, fd: int, keys: tuple[int, bytes, bytes] | None = None
    ) -> None: ...
    def all_reduce(
        self, input: int, output: int, count: int, dtype: int, op: int, shape: Sequence[int]
    ) -> None: ...
    # In place. False, and nothing is done, if not `reads_tensor` or the dtype lacks the reduction.
    def all_reduce_tensor(self, tensor: object | None, op: int) -> bool: ...
    def start_all_reduce(
        self, input: int, output: int, count: int, dtype: int, op: int, shape: Sequence[int]
    ) -> Work: ...
    def run(
        self,
        kind: int,
        dtype: int,
        op: int,
        root: int,
        inputs: Parts,
        outputs: Parts,
        shape: Sequence[int],
    ) -> None: ...
    def start(
        self,
        kind: int,
        dtype: int,
        op: int,
        root: int,
        inputs: Parts,
        outputs: Parts,
        shape: Sequence[int],
    ) -> Work: ...
    # Named operations may be submitted in any order; `detail` is a hash of what else must be alike.
    def all_reduce_named(
        self,
        name: str,
        detail: int,
        input: int,
        output: int,
        count: int,
        dtype: int,
        op: int,
        shape: Sequence[int],
    ) -> None: ...
    def start_named(
        self,
        name: str,
        detail: int,
        kind: int,
        dtype: int,
        op: int,
        root: int,
        inputs: Parts,
        outputs: Parts,
        shape: Sequence[int],
        takes_any_size: bool = False,  # the engine allocates the outputs: see Work.output
        background: bool = True,
    ) -> Work: ...
    def start_send(
        self,
        member: int,
        tag: int,
        address: int,
        count: int,
        dtype: int,
        background: bool = True,
    ) -> Work: ...
    def start_receive(
        self,
        member: int,
        tag: int,
        address: int,
        count: int,
        dtype: int,
        background: bool = True,
    ) -> Work: ...
