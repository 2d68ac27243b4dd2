"""Every error that Paceline raises, in one tree ordered by what the caller should do about it.

    PacelineError (RuntimeError)    code written for torch.distributed, which raises RuntimeError,
    |                               also catches ours
    |-- UsageError (ValueError)     fix your code or configuration
    |   |-- ConfigError             a setting has a wrong value; names the setting and its source
    |   |   |-- FrameworkMissing    (ImportError) an optional package is not installed, or not in a
    |   |                           version that was tested; names the extra
    |   |-- CollectiveMismatch      ranks called different operations, or one with different tensors
    |   |-- UnsupportedTensor       a device, layout or dtype that the engine cannot move
    |   |-- DataError               the data cannot be split, read or resumed as asked
    |   |-- NonFiniteGradient       a gradient is NaN or infinite; names rank, step and parameter
    |   |-- InconsistentRanks       ranks hold different values of what must be the same everywhere
    |   |-- UnknownKey              no server holds a key of that name
    |   |-- ShapeMismatch           an array does not have the shape or dtype of its key
    |-- PeerError                   recoverable: reconfigure, retry or stop cleanly
    |   |-- PeerLost                a peer's process ended or its connection broke
    |   |   |-- ServerLost          it was a parameter server; names it and the shards that it held
    |   |-- PeerTimeout             a peer is present but has not answered before the deadline
    |   |-- GenerationChanged       the membership changed during an operation
    |   |-- Evicted                 this process was taken for lost; the job continues without it
    |   |-- JobOver                 too many members were lost: the job cannot continue
    |-- ProtocolError               a bug or version skew: stop
    |   |-- BadFrame                bytes that no Paceline process would send
    |   |-- VersionMismatch         peers run different versions
    |-- DeviceError                 a device failed or disappeared; names the rank and the device
    |   |-- DeviceMemoryError       it has too little memory for what training adds to the model
    |-- CheckpointError             it could not be written or read (disk full, EIO); names the path
    |   |-- CheckpointCorrupt       not what was written; names the file, expected and found hash
    |   |-- CheckpointMismatch      it belongs to another model
    |   |-- CheckpointUnsupported   its format is newer than this version
    |   |-- CheckpointUnsafe        a pickle, a link, or a name that leads out of the directory
    |-- HorovodInternalError        an operation of paceline.horovod failed; elastic.run retries
    |-- SetupError                  the job could not be formed on this machine or network
        |-- RendezvousError         a rank is missing, claimed twice or out of range
        |   |-- TooLate             the job is over, or its workers are finishing
        |-- AuthError               wrong, missing or badly protected job secret
        |-- ConnectError            an address cannot be reached
        |-- PortInUse               an explicitly requested port is taken
        |-- SharedMemoryError       the memory for a segment cannot be allocated
        |-- LaunchError             a process could not be started

A message names the process (rank, peer), the operation or tensor, found against expected, and what
to do next. Errors that concern one peer have its rank as `.rank`.
"""

from __future__ import annotations


class PacelineError(RuntimeError):
    """Base of every error that Paceline raises on purpose."""


def named(kind: str, text: str) -> PacelineError:
    """Return the error that another process sent by name; only classes of this tree are made."""
    found = globals().get(kind)
    if not (isinstance(found, type) and issubclass(found, PacelineError)):
        found = ProtocolError
    return found(text)


def is_caused_by_loss(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, is the loss of another process.

    Of an error that torch has passed through C++ only the name of its class is left.
    """
    while error is not None:
        by_name = named(str(error).partition(":")[0], "")
        if any(isinstance(one, PeerLost | GenerationChanged | Evicted) for one in (error, by_name)):
            return True
        error = error.__cause__ or error.__context__
    return False


class UsageError(PacelineError, ValueError):
    """The calling code or its configuration is wrong; retrying will not help."""


class ConfigError(UsageError):
    """A setting has a value that cannot be used."""


class FrameworkMissing(ConfigError, ImportError):
    """An optional package is not installed, or not in a version that was tested."""


class CollectiveMismatch(UsageError):
    """Ranks disagree about which collective comes next, or about its tensors."""


class UnsupportedTensor(UsageError):
    """A tensor whose device, layout or dtype the engine cannot move."""


class DataError(UsageError):
    """The data is empty, too small, differs between ranks, cannot be read, or cannot be resumed
    from a checkpoint."""


class InconsistentRanks(UsageError):
    """Ranks hold different values, or kinds, of something that must be the same on all of them.

    The cause is in the script (a rank changed its model alone, or a computation depends on the
    rank), so neither continuing nor retrying removes the difference.
    """

    def __init__(
        self, message: str, *, name: str = "", sides: tuple[tuple[int, ...], ...] = ()
    ) -> None:
        super().__init__(message)
        self.name = name  # of the first thing that differs
        self.sides = sides  # ranks that agree with each other; the side with most ranks first


class NonFiniteGradient(UsageError):
    """A gradient is NaN or infinite on some rank; raised on all of them."""


class UnknownKey(UsageError):
    """No server holds a key of that name, or it has no value yet."""


class ShapeMismatch(UsageError):
    """An array does not have the shape or the dtype that its key has on the servers."""


class PeerError(PacelineError):
    """Something happened to another process of the job."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


def names_of_peer_errors() -> list[str]:
    """Return the names of all errors about another process, as a traceback shows them."""
    found: list[type[PeerError]] = [PeerError]
    for kind in found:
        found += kind.__subclasses__()
    return [kind.__name__ for kind in found]


class PeerLost(PeerError):
    """A peer's process ended, or the connection to it broke."""


class ServerLost(PeerLost):
    """A parameter server's process ended, and with it the shards that only it held."""


class PeerTimeout(PeerError):
    """A peer exists but did not do its part before the deadline."""


class GenerationChanged(PeerError):
    """The membership changed during the operation; its result is undefined."""


class Evicted(PeerError):
    """This process is no longer in the job: it was stopped, cut off or stuck for too long."""


class JobOver(PeerError):
    """The job cannot continue: too few workers are left, or a partition has no holder."""


class HorovodInternalError(PacelineError):
    """An operation of `paceline.horovod` failed: ranks disagree, or a rank was lost."""

    # The loss or change of workers that caused it. Keras removes the `__cause__` of what it passes.
    peer_error: PeerError | None = None


class ProtocolError(PacelineError):
    """Peers do not follow the same protocol: a bug or version skew."""


class BadFrame(ProtocolError):
    """Received bytes violate the wire format."""


class VersionMismatch(ProtocolError):
    """Peers run incompatible versions of Paceline."""


class CheckpointError(PacelineError):
    """A checkpoint could not be written or read; the training itself is not affected."""

    def __init__(self, message: str, *, path: object = None) -> None:
        super().__init__(message)
        self.path = None if path is None else str(path)  # the file or directory in question


class CheckpointCorrupt(CheckpointError):
    """A checkpoint is not what was written: bytes, files or the relations between them differ."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint is intact, but belongs to another model or optimizer."""


class CheckpointUnsupported(CheckpointError):
    """A checkpoint has a newer format than this version of Paceline supports."""


class CheckpointUnsafe(CheckpointError):
    """Loading would run code, or read or write outside of the checkpoint's directory."""


class SetupError(PacelineError):
    """The job could not be formed."""


class RendezvousError(SetupError):
    """The set of ranks is incomplete, ambiguous or out of range."""


class TooLate(RendezvousError):
    """No process can join any more: the job is over, or its workers are finishing."""


class AuthError(SetupError):
    """The job secret is wrong, missing or badly protected."""


class ConnectError(SetupError):
    """An address of the job cannot be reached."""


class PortInUse(SetupError):
    """A port that was requested by number is taken."""


class SharedMemoryError(SetupError):
    """The memory for a shared segment cannot be allocated."""


class DeviceError(PacelineError):
    """A device failed or disappeared."""


class DeviceMemoryError(DeviceError):
    """A device has too little memory for what training adds to the model."""


class LaunchError(SetupError):
    """A process of the job could not be started."""
