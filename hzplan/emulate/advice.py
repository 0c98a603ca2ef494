"""Messages for machines that cannot emulate: the missing part and the command that provides it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from hzplan.errors import JobFailed, UserError

_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux"}
_MODULES = {"bridge": "bridge", "veth": "veth", "tbf": "sch_tbf"}


def lacks(platform: str, missing_tools: Iterable[str]) -> str | None:
    """Why a machine cannot emulate, as one sees from outside; None where nothing is known to be missing."""
    if platform != "linux":
        return f"emulation needs Linux, this is {platform}; run it in a Linux machine or container"
    missing = list(missing_tools)
    if missing:
        packages = " ".join(sorted({_PACKAGES[tool] for tool in missing}))
        return f"emulation needs {' and '.join(missing)}, which is not on PATH; apt-get install {packages}"
    return None


def not_begun(said: str, *, root: bool) -> UserError:
    """The error for namespaces that did not start, from the output ``said`` of unshare or the first
    process."""
    lines = said.strip().splitlines() or [""]
    if lines[-1].startswith("unshare:") and "failed to execute" not in said:
        return UserError(refused(said, root=root))
    return JobFailed(f"the emulated cluster did not start: {_quote(lines[-1])}")


def refused(said: str, *, root: bool) -> str:
    """The message where unshare failed with the output ``said``."""
    if root:
        todo = "give the container CAP_SYS_ADMIN and CAP_NET_ADMIN, or allow it user namespaces"
    elif "No space left" in said:
        todo = "sysctl -w user.max_user_namespaces=10000 as root, or run as root"
    elif "uid_map" in said or "gid_map" in said or "setgroups" in said:
        todo = "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 as root, or run as root"
    else:
        todo = (
            "as root sysctl -w kernel.unprivileged_userns_clone=1 user.max_user_namespaces=10000, with "
            "AppArmor also kernel.apparmor_restrict_unprivileged_userns=0; or run as root"
        )
    return f"this machine refuses to make namespaces ({_quote(said)}); {todo}"


def failed(line: str, said: str) -> str:
    """The message where a line of ip or tc failed with the output ``said``."""
    lower = said.lower()
    for word, module in _MODULES.items():
        if word in line.split() and ("unknown" in lower or "not supported" in lower):
            return f"the kernel does not know {word} ({_quote(said)}); modprobe {module}"
    if "not permitted" in lower:
        todo = "run as root, or sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 as root"
        return f"this machine refuses to make a network ({_quote(said)}); {todo}"
    return f"the network was not made: {_quote(said)} (at: {line})"


def _quote(said: str, limit: int = 160) -> str:
    return " ".join(said.split())[:limit] or "it did not say why"
