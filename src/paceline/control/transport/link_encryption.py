"""Whether a link between two members is encrypted, and with which keys.

The caller decides by the listener's address and PACELINE_ENCRYPT, and names the cipher in the
purpose of its Hello. So both ends authenticate the choice. The listener decides in the same way
and refuses a link that does not match: a sealed frame after the handshake has the reason, and is
empty if the link is accepted. Unix sockets are never encrypted.

The keys are derived from the handshake: every connection and direction has its own. The C++ core
encrypts (wire/record.h).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.control.transport.auth import Session

CIPHERS = ("aes-256-gcm", "chacha20-poly1305")  # as in the core
CROSSED = "crossed"  # the listener is connecting to the caller: that link counts
_MARK = ", encrypted with "
_KIND = {True: "encrypted", False: "plain"}


@dataclass(frozen=True)
class LinkKeys:
    """How the two directions of one connection are encrypted."""

    cipher: str
    send: bytes = field(repr=False)
    receive: bytes = field(repr=False)

    @classmethod
    def of(cls, session: Session, cipher: str) -> LinkKeys | None:
        """Derive the keys of an authenticated connection; None without a cipher."""
        return cls(cipher, *session.export_keys(cipher.encode())) if cipher else None


@dataclass(frozen=True)
class Link:
    """An authenticated connection: its descriptor, which the receiver owns, and its keys."""

    fd: int
    keys: LinkKeys | None


def with_cipher(purpose: str, cipher: str) -> str:
    """Return the purpose that a Hello names; "" is no cipher."""
    return f"{purpose}{_MARK}{cipher}" if cipher else purpose


def split_cipher(purpose: str) -> tuple[str, str]:
    """Return the two parts that `with_cipher` has put together."""
    own, _, cipher = purpose.partition(_MARK)
    return own, cipher


def refusal(caller: int, cipher: str, listener: int, is_encrypted: bool, setting: str) -> str:
    """Return why rank `listener` refuses the cipher that rank `caller` has chosen; "" if not."""
    if cipher and cipher not in CIPHERS:
        return f"rank {caller} encrypts with {cipher!r}, which rank {listener} does not have"
    if bool(cipher) == is_encrypted:
        return ""
    return (
        f"rank {caller} sends {_KIND[bool(cipher)]} data to rank {listener}, which expects"
        f" {_KIND[is_encrypted]} data (it has PACELINE_ENCRYPT={setting}); set PACELINE_ENCRYPT to"
        " the same value in every process of the job"
    )
