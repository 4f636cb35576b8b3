"""The one family of errors a caller can see.

A class's docstring is its default message. Dialects render the fields; nothing
else decides what a refusal looks like. `retry` says whether trying the same
thing again can help: True, False, or None when the client may decide.
"""

from __future__ import annotations

from typing import Any, ClassVar


class RelevoError(Exception):
    """Something went wrong inside Relevo. The log has the details."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    retry: ClassVar[bool | None] = None

    def __init__(
        self,
        message: str | None = None,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        detail: dict[str, Any] | None = None,
    ) -> None:
        self.message = message or (type(self).__doc__ or "").strip()
        self.param = param
        self.retry_after_s = retry_after_s
        self.detail = detail or {}
        super().__init__(self.message)


class OurBug(RelevoError):
    """Relevo broke one of its own rules. This is our bug, never the caller's."""


# --- the caller's mistakes: nothing changed, trying again unchanged cannot help ---


class BadRequest(RelevoError):
    """The request is not valid."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"
    retry = False


class UnsupportedParameter(BadRequest):
    """This parameter is not supported here."""

    code = "unsupported_parameter"


class ContextLengthExceeded(BadRequest):
    """The prompt and the output asked for do not fit in the model's context."""

    code = "context_length_exceeded"


class Unauthorized(RelevoError):
    """A valid key is needed: send it as `Authorization: Bearer KEY`. `relevo keys create NAME` makes one."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"
    retry = False


class OperatorOnly(RelevoError):
    """Only the operator may do this: use the command on this machine, as the user who runs Relevo."""

    status = 403
    type = "authentication_error"
    code = "operator_only"
    retry = False


class NotGranted(RelevoError):
    """The key of this request does not allow what it asks for."""

    status = 403
    type = "invalid_request_error"
    code = "not_granted"
    retry = False


class HostNotAllowed(RelevoError):
    """This host name is not on the allow-list. Add it under `server.allowed_hosts` in the configuration."""

    status = 421
    type = "invalid_request_error"
    code = "host_not_allowed"
    retry = False


class OriginNotAllowed(RelevoError):
    """Requests from web pages of another origin are not allowed."""

    status = 403
    type = "invalid_request_error"
    code = "origin_not_allowed"
    retry = False


class NotFound(RelevoError):
    """There is nothing at this address."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"
    retry = False


class ModelNotFound(NotFound):
    """No model has this name here."""

    code = "model_not_found"


class DeviceNotFound(NotFound):
    """No device has this name here."""

    code = "device_not_found"


class RequestNotFound(NotFound):
    """No request has this id here. It may be older than the retention time."""

    code = "request_not_found"


class MethodNotAllowed(RelevoError):
    """This address does not take this method."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"
    retry = False


class Conflict(RelevoError):
    """The request is in a state that does not allow this."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"
    retry = False


class IdempotencyMismatch(RelevoError):
    """This Idempotency-Key was used with another request body."""

    status = 422
    type = "invalid_request_error"
    code = "idempotency_key_reused"
    retry = False


class BodyTooLarge(RelevoError):
    """The request body is larger than allowed."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"
    retry = False


class HeadersTooLarge(RelevoError):
    """The request's headers are larger than allowed."""

    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"
    retry = False


class RequestTimeout(RelevoError):
    """The request body did not arrive in time."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"
    retry = True


# --- refusals: well-formed, but it can't be served now ---


class QueueFull(RelevoError):
    """Every place in the queue is taken. Try again after the time given."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"
    retry = True


class TooManyRequests(RelevoError):
    """This key has as many requests under way as it may. Try again when one has ended."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retry = True


class NothingCanServe(RelevoError):
    """No route of this model can take work now."""

    status = 503
    type = "service_unavailable_error"
    code = "server_is_overloaded"
    retry = True


class PolicyRefuses(RelevoError):
    """The route this request insists on cannot take it now, and its policy allows no other."""

    status = 503
    type = "service_unavailable_error"
    code = "policy_refused"
    retry = False


class DoesNotFit(RelevoError):
    """The request needs more memory than any open route of this model has."""

    status = 503
    type = "service_unavailable_error"
    code = "does_not_fit"
    retry = False


class DeadlineUnreachable(RelevoError):
    """The request's deadline cannot be met by the estimate."""

    status = 503
    type = "service_unavailable_error"
    code = "deadline_unreachable"
    retry = False


class DeadlinePassed(RelevoError):
    """The request's deadline passed before it could be served."""

    status = 504
    type = "server_error"
    code = "deadline_passed"
    retry = False


class JournalUnavailable(RelevoError):
    """The journal cannot be written (see `relevo doctor`), so nothing can be accepted. Accepted work goes on."""

    status = 503
    type = "service_unavailable_error"
    code = "journal_unavailable"
    retry = True


class Draining(RelevoError):
    """Relevo is shutting down and takes no new work."""

    status = 503
    type = "service_unavailable_error"
    code = "draining"
    retry = True


# --- ends of accepted requests ---


class Resumable(RelevoError):
    """The route was lost after output had been delivered. What was delivered is kept; resume the request to go on."""

    status = 503
    type = "server_error"
    code = "resumable"
    retry = False


class Cancelled(RelevoError):
    """The request was cancelled."""

    status = 409
    type = "invalid_request_error"
    code = "cancelled"
    retry = False


class EngineFailed(RelevoError):
    """The engine failed on this request on every route it could take."""

    status = 500
    type = "server_error"
    code = "engine_failed"
    retry = False


class ResumeExpired(RelevoError):
    """The request was resumable, and nobody resumed it in time. What was delivered stays in its record."""

    status = 410
    type = "invalid_request_error"
    code = "resume_expired"
    retry = False


# --- start-up: one clear sentence and a non-zero exit ---


class StartupError(RelevoError):
    """Relevo cannot start."""

    code = "startup"
    retry = False


class ConfigError(StartupError):
    """The configuration is not valid."""

    code = "config"


class StateFolderError(StartupError):
    """The state folder cannot be used."""

    code = "state_folder"


class StateFolderBusy(StateFolderError):
    """Another Relevo is running on this state folder."""

    code = "state_folder_busy"


class ModelFileError(StartupError):
    """The model file cannot be used."""

    code = "model_file"


class LibraryError(StartupError):
    """The engine's native library cannot be used."""

    code = "library"


class DeviceError(StartupError):
    """The device cannot be used."""

    code = "device"
