from rgpu.api.current import Current as Current
from rgpu.api.current import current as current
from rgpu.api.pool import Pool as Pool
from rgpu.api.rows import Checkpoint as Checkpoint
from rgpu.api.rows import Device as Device
from rgpu.api.rows import Event as Event
from rgpu.api.rows import Move as Move
from rgpu.api.rows import Node as Node
from rgpu.api.rows import Restored as Restored
from rgpu.api.rows import Session as Session
from rgpu.api.running import Run as Run
from rgpu.session.errors import AlreadyExists as AlreadyExists
from rgpu.session.errors import AuthenticationFailed as AuthenticationFailed
from rgpu.session.errors import Conflict as Conflict
from rgpu.session.errors import Corrupt as Corrupt
from rgpu.session.errors import DeviceError as DeviceError
from rgpu.session.errors import Fenced as Fenced
from rgpu.session.errors import LimitReached as LimitReached
from rgpu.session.errors import LinkError as LinkError
from rgpu.session.errors import MoveFailed as MoveFailed
from rgpu.session.errors import NotFound as NotFound
from rgpu.session.errors import NotPermitted as NotPermitted
from rgpu.session.errors import PoolUnavailable as PoolUnavailable
from rgpu.session.errors import RecoveryFailed as RecoveryFailed
from rgpu.session.errors import Refused as Refused
from rgpu.session.errors import RgpuError as RgpuError
from rgpu.session.errors import StoreDenied as StoreDenied
from rgpu.session.errors import StoreError as StoreError
from rgpu.session.errors import StoreFull as StoreFull
from rgpu.session.errors import StoreMissing as StoreMissing
from rgpu.session.errors import StoreUnreachable as StoreUnreachable
from rgpu.session.errors import TimedOut as TimedOut
from rgpu.session.errors import UnknownOutcome as UnknownOutcome
from rgpu.session.errors import UsageError as UsageError
from rgpu.session.errors import VersionMismatch as VersionMismatch

__all__: list[str]
__version__: str
