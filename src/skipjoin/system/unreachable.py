from __future__ import annotations

import os
import socket
import ssl


def why_unreachable(error: BaseException) -> str:
    cause = getattr(error, "os_error", None) or getattr(error, "reason", None)  # of aiohttp and urllib
    cause = cause if isinstance(cause, OSError) else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({cause.verify_message}); SSL_CERT_FILE names a file of authorities"
    if isinstance(cause, ssl.SSLError):
        return f"it does not speak TLS as this client does ({cause.reason}); http:// is without"
    if isinstance(cause, socket.gaierror):  # whose number is not one of the system's
        return str(cause.strerror)
    if isinstance(cause, OSError) and cause.errno is not None:
        return os.strerror(cause.errno).lower()
    return str(error) or type(error).__name__
