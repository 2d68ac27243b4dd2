"""Every error that Paceline raises, in one tree decided by what the caller should do about it.

    PacelineError (RuntimeError)    so that code written for torch.distributed, which raises that,
    |                               also catches ours
    |-- UsageError (ValueError)     fix your code or configuration
    |   |-- ConfigError             a setting has a wrong value; names the setting and its source
    |   |-- CollectiveMismatch      ranks called different operations, or one with different tensors
    |   |-- UnsupportedTensor       a device, layout or dtype that the engine cannot move
    |   |-- DataError               the data cannot be shared out, read or continued as asked
    |   |-- NonFiniteGradient       a gradient is NaN or infinite; names rank, step and parameter
    |   |-- InconsistentRanks       ranks hold different values of what must be the same everywhere
    |   |-- UnknownKey              no server holds a key of that name
    |   |-- ShapeMismatch           an array does not have the shape or dtype of its key
    |-- PeerError                   recoverable: reconfigure, retry or stop cleanly
    |   |-- PeerLost                a peer's process ended or its connection broke
    |   |   |-- ServerLost          it was a parameter server; names it and the shards that it held
    |   |-- PeerTimeout             a peer is there but has not answered in time
    |   |-- GenerationChanged       the membership changed under an operation
    |   |-- Evicted                 the others took this process for lost and go on without it
    |   |-- JobOver                 too many were lost: the job as a whole cannot go on
    |-- ProtocolError               a bug or version skew: stop
    |   |-- BadFrame                bytes that no Paceline process would send
    |   |-- VersionMismatch         peers run different versions
    |-- CheckpointError             it could not be written or read (disk full, EIO); names the path
    |   |-- CheckpointCorrupt       not what was written; names the file, expected and found hash
    |   |-- CheckpointMismatch      that of another model
    |   |-- CheckpointUnsupported   of a newer format than this version knows
    |   |-- CheckpointUnsafe        a pickle, a link, or a name that leads out of the directory
    |-- SetupError                  the job could not be formed on this machine or network
        |-- RendezvousError         a rank is missing, claimed twice or out of range
        |   |-- TooLate             the job is over, or its workers are finishing
        |-- AuthError               wrong, missing or badly protected job secret
        |-- ConnectError            an address cannot be reached
        |-- PortInUse               an explicitly requested port is taken
        |-- SharedMemoryError       the memory for a segment cannot be had
        |-- LaunchError             a process could not be started

A message says who (rank, peer), what (operation, tensor), expected against found, what to do next.
Errors that concern one peer carry its rank as `.rank`.
"""

from __future__ import annotations


class PacelineError(RuntimeError):
    """Base of every error that Paceline raises on purpose."""


def named(kind: str, text: str) -> PacelineError:
    """Make an error again that another process told by name; only classes of this tree come out."""
    found = globals().get(kind)
    if not (isinstance(found, type) and issubclass(found, PacelineError)):
        found = ProtocolError
    return found(text)


def tells_of_loss(error: BaseException | None) -> bool:
    """Return whether an error, or what it was raised from, is the loss of another process.

    Of an error that torch has passed through C++ only the name of its class is left.
    """
    while error is not None:
        told = named(str(error).partition(":")[0], "")
        if any(isinstance(one, PeerLost | GenerationChanged | Evicted) for one in (error, told)):
            return True
        error = error.__cause__ or error.__context__
    return False


class UsageError(PacelineError, ValueError):
    """The calling code or its configuration is wrong; retrying will not help."""


class ConfigError(UsageError):
    """A setting has a value that cannot be used."""


class CollectiveMismatch(UsageError):
    """Ranks disagree about which collective comes next, or about its tensors."""


class UnsupportedTensor(UsageError):
    """A tensor whose device, layout or dtype the engine cannot move."""


class DataError(UsageError):
    """The data is empty, too little, differs between ranks, cannot be read, or cannot be continued
    from a checkpoint."""


class InconsistentRanks(UsageError):
    """Ranks hold different values, or kinds, of something that must be the same on all of them.

    The cause is in the script (a rank changed its model alone, or a computation depends on the
    rank), so going on or trying again keeps the difference.
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
    """Return the names of all errors that tell of another process, as a traceback shows them."""
    found: list[type[PeerError]] = [PeerError]
    for kind in found:
        found += kind.__subclasses__()
    return [kind.__name__ for kind in found]


class PeerLost(PeerError):
    """A peer's process ended, or the connection to it broke."""


class ServerLost(PeerLost):
    """A parameter server's process ended, and with it the shards that only it held."""


class PeerTimeout(PeerError):
    """A peer exists but did not do its part in time."""


class GenerationChanged(PeerError):
    """The membership changed while the operation was under way; its result is undefined."""


class Evicted(PeerError):
    """This process is not in the job any more: it was stopped, cut off or stuck for too long."""


class JobOver(PeerError):
    """The job as a whole cannot go on: too few workers are left, or a partition has no holder."""


class ProtocolError(PacelineError):
    """Peers do not speak the same language: a bug or version skew."""


class BadFrame(ProtocolError):
    """Received bytes violate the wire format."""


class VersionMismatch(ProtocolError):
    """Peers run incompatible versions of Paceline."""


class CheckpointError(PacelineError):
    """A checkpoint could not be written or read; what is being trained is not affected."""

    def __init__(self, message: str, *, path: object = None) -> None:
        super().__init__(message)
        self.path = None if path is None else str(path)  # the file or directory in question


class CheckpointCorrupt(CheckpointError):
    """A checkpoint is not what was written: bytes, files or the relations between them differ."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint is whole, but not that of the model (or optimizer) it is to be loaded into."""


class CheckpointUnsupported(CheckpointError):
    """A checkpoint has a newer format than this version of Paceline knows."""


class CheckpointUnsafe(CheckpointError):
    """Loading would run code, or read or write outside of the checkpoint's directory."""


class SetupError(PacelineError):
    """The job could not be formed."""


class RendezvousError(SetupError):
    """The set of ranks is incomplete, ambiguous or out of range."""


class TooLate(RendezvousError):
    """Nobody can join any more: the job is over, or its workers are finishing."""


class AuthError(SetupError):
    """The job secret is wrong, missing or badly protected."""


class ConnectError(SetupError):
    """An address of the job cannot be reached."""


class PortInUse(SetupError):
    """A port that was asked for by number is taken."""


class SharedMemoryError(SetupError):
    """The memory for a shared segment cannot be had."""


class LaunchError(SetupError):
    """A process of the job could not be started."""
