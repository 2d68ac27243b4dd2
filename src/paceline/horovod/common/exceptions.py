"""The exceptions that scripts catch."""

from paceline.errors import HorovodInternalError as HorovodInternalError
from paceline.horovod.elastic import HostsUpdatedInterrupt as HostsUpdatedInterrupt
