"""The job's secret, and proof that both ends of a connection know it.

The SECRET is 256 random bits in a private file. It never travels in an argument (command lines are
public) and never in a message: a process receives the name of the file. A file that other users can
read is refused.

The handshake, which does no I/O, has four messages between the caller (which connected) and the
listener (which accepted):

    caller   -> listener   Hello      version, role and rank of the caller, purpose, a nonce
    caller  <-  listener   Challenge  a nonce, HMAC(secret, "listener", transcript)
    caller   -> listener   Proof      HMAC(secret, "caller", transcript)
    caller  <-  listener   an empty sealed frame: the connection is accepted

The transcript binds version, job, listener, caller and both nonces, so a message recorded from
another connection, job or direction proves nothing. The job id is never sent: if two jobs meet by
accident, the handshake fails. The listener proves itself first, so that a caller with the wrong
secret can report it, while a failing caller learns nothing from the listener.

Both sides then derive one key per direction with HKDF. `Session` seals each frame with the key and
a counter, which refuses replayed, reordered and reflected frames. This hides nothing: between hosts
the whole exchange runs inside TLS (tls.py).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

from paceline.errors import AuthError, BadFrame, VersionMismatch

PROTOCOL_VERSION = 1
SECRET_BYTES = 32
NONCE_BYTES = 32
TAG_BYTES = 32
_HOW_TO = (
    "create one with: (umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > FILE)"
)

_T = TypeVar("_T")


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def create_secret_file(directory: str | os.PathLike[str]) -> Path:
    """Write a new secret into `directory`, readable by this user only; return its path."""
    path = Path(directory) / f"secret-{secrets.token_hex(8)}"
    write_private(path, new_secret().hex().encode() + b"\n")
    return path


def load_secret(path: str | os.PathLike[str], *, is_mounted: bool = False) -> bytes:
    """Read a secret; AuthError names the file when it is missing, exposed or malformed.

    `is_mounted`: Kubernetes mounted it, and lets the group of the pod read root's file.
    """
    text = read_private(path, is_mounted=is_mounted).decode("ascii", errors="replace").strip()
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise AuthError(
            f"secret file {os.fspath(path)} does not hold {2 * SECRET_BYTES} hexadecimal digits;"
            f" {_HOW_TO}"
        )
    return secret


def write_private(path: Path, content: bytes) -> None:
    """Create a new file of mode 0600, following no link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(content)


def read_private(path: str | os.PathLike[str], *, is_mounted: bool = False) -> bytes:
    """Read a small file after checking, on the open descriptor, that only this user can use it."""
    exposed = 0o037 if is_mounted else 0o077
    name = os.fspath(path)
    try:
        # O_NONBLOCK: opening a pipe that another user put there must not hang.
        with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise AuthError(f"secret file {name} is not a regular file; {_HOW_TO}")
            if status.st_uid not in (os.getuid(), 0):
                raise AuthError(
                    f"secret file {name} belongs to uid {status.st_uid}, this process to"
                    f" {os.getuid()}; use a file of your own"
                )
            mode = stat.S_IMODE(status.st_mode)
            if mode & exposed:
                raise AuthError(
                    f"secret file {name} has mode {mode:04o}, other users can use it; expected"
                    f" 0600: make a new secret, then chmod 600 {name}"
                )
            return file.read(4096)
    except OSError as error:
        raise AuthError(f"secret file {name} cannot be read: {error.strerror}") from error


class Hello(msgspec.Struct, frozen=True):
    """The caller's first message: all that a listener knows before it decides."""

    version: int
    role: str
    rank: int
    purpose: str  # "control", or the name of a link
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True):
    version: int
    nonce: bytes = b""  # empty when the version is refused
    proof: bytes = b""


class Proof(msgspec.Struct, frozen=True):
    proof: bytes


class _Version(msgspec.Struct, frozen=True):
    """The part of Hello and Challenge that every version of the protocol can read."""

    version: int


class Session:
    """Seals and opens the frames of one authenticated connection. Not thread-safe."""

    def __init__(self, send_key: bytes, receive_key: bytes) -> None:
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = 0

    def seal(self, payload: bytes) -> bytes:
        """Return payload and tag; every call uses up one counter value."""
        tag = _tag(self._send_key, self._sent, payload)
        self._sent += 1
        return payload + tag

    def open(self, frame: bytes) -> bytes:
        """Return the payload of the next frame; AuthError unless it is exactly the next one."""
        payload, tag = frame[:-TAG_BYTES], frame[-TAG_BYTES:]
        if not hmac.compare_digest(tag, _tag(self._receive_key, self._received, payload)):
            raise AuthError(
                f"frame {self._received} of an authenticated connection has a wrong tag: it was"
                " altered, replayed or not sent by the peer; the connection is closed"
            )
        self._received += 1
        return payload

    def export_keys(self, label: bytes) -> tuple[bytes, bytes]:
        """Return keys for another use of this connection: one to send with, one to receive."""
        salt = b"paceline exported key"
        return hkdf(self._send_key, salt, label), hkdf(self._receive_key, salt, label)


class CallerHandshake:
    """The connecting side: hello() -> answer(challenge) -> finish(frame)."""

    def __init__(
        self, secret: bytes, *, job_id: str, listener: str, role: str, rank: int, purpose: str
    ) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._hello = Hello(PROTOCOL_VERSION, role, rank, purpose, nonce)
        self.secret, self._job_id, self._listener = secret, job_id, listener
        self._session: Session | None = None

    def hello(self) -> bytes:
        return msgspec.msgpack.encode(self._hello)

    def answer(self, message: bytes) -> bytes:
        """Check the listener's proof and return ours."""
        found = _decode(message, _Version).version
        if found != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"protocol {found} there, {PROTOCOL_VERSION} here;"
                " install the same Paceline version everywhere"
            )
        challenge = _decode(message, Challenge)
        keys = _Keys(self.secret, self._job_id, self._listener, self._hello, challenge.nonce)
        if not hmac.compare_digest(challenge.proof, keys.listener_proof):
            raise self.wrong_listener()
        self._session = Session(keys.caller_key, keys.listener_key)
        return msgspec.msgpack.encode(Proof(keys.caller_proof))

    def wrong_listener(self) -> AuthError:
        """Return the error for a listener that has not proved that it has our secret."""
        return AuthError(
            f"the process that listens there is not the {self._listener} of job {self._job_id}"
            " with our secret; another job has that address, or the secret files differ"
        )

    def finish(self, frame: bytes) -> Session:
        """Check that the listener accepted; the session is ready for use."""
        assert self._session is not None, "answer() comes first"
        if self._session.open(frame) != b"":
            raise BadFrame(f"{self._listener} ended the handshake with an unexpected payload")
        return self._session


class ListenerHandshake:
    """The accepting side: challenge(hello) -> accept(proof); sets `caller` and `session`."""

    def __init__(self, secret: bytes, *, job_id: str, listener: str) -> None:
        self._secret, self._job_id, self._listener = secret, job_id, listener
        self._keys: _Keys
        self._version = 0
        self.caller: Hello
        self.session: Session

    def challenge(self, message: bytes) -> bytes:
        """Answer a hello, also one of another version: its caller must learn ours."""
        self._version = _decode(message, _Version).version
        if self._version != PROTOCOL_VERSION:
            return msgspec.msgpack.encode(Challenge(PROTOCOL_VERSION))
        self.caller = _decode(message, Hello)
        if len(self.caller.nonce) != NONCE_BYTES:
            raise BadFrame(f"nonce of {len(self.caller.nonce)} bytes, expected {NONCE_BYTES}")
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._keys = _Keys(self._secret, self._job_id, self._listener, self.caller, nonce)
        return msgspec.msgpack.encode(Challenge(PROTOCOL_VERSION, nonce, self._keys.listener_proof))

    def require_version(self) -> None:
        """Raise VersionMismatch if the hello was of another version."""
        if self._version != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"a caller speaks protocol {self._version}, this process {PROTOCOL_VERSION};"
                " install the same Paceline version everywhere"
            )

    def accept(self, message: bytes) -> bytes:
        """Check the caller's proof; return the frame that accepts it."""
        self.require_version()
        proof = _decode(message, Proof).proof
        if not hmac.compare_digest(proof, self._keys.caller_proof):
            raise AuthError(f"a caller that claims rank {self.caller.rank} has another secret")
        self.session = Session(self._keys.listener_key, self._keys.caller_key)
        return self.session.seal(b"")


class _Keys:
    """What both sides compute from the secret and the messages so far."""

    def __init__(
        self, secret: bytes, job_id: str, listener: str, hello: Hello, nonce: bytes
    ) -> None:
        # msgpack keeps the borders between fields, so that no two transcripts look alike.
        transcript = msgspec.msgpack.encode((job_id, listener, hello, nonce))
        self.listener_proof = _mac(secret, b"paceline listener proof", transcript)
        self.caller_proof = _mac(secret, b"paceline caller proof", transcript)
        salt = hello.nonce + nonce
        self.caller_key = hkdf(secret, salt, b"paceline caller key" + transcript)
        self.listener_key = hkdf(secret, salt, b"paceline listener key" + transcript)


def hkdf(key: bytes, salt: bytes, info: bytes) -> bytes:
    """Derive a 32-byte key: HKDF-SHA-256 (RFC 5869) for the one output block that we need."""
    extracted = hmac.digest(salt, key, hashlib.sha256)
    return hmac.digest(extracted, info + b"\x01", hashlib.sha256)


def _mac(key: bytes, label: bytes, message: bytes) -> bytes:
    return hmac.digest(key, label + b"\x00" + message, hashlib.sha256)


def _tag(key: bytes, counter: int, payload: bytes) -> bytes:
    return hmac.digest(key, counter.to_bytes(8, "little") + payload, hashlib.sha256)


def _decode(message: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(message, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"handshake message is not a {kind.__name__}: {error}") from None
