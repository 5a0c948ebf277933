"""What is done on a machine that only runs commands, as scripts for its bash and coreutils.

Owns the scripts, and how bytes get there and back: base64 in both directions, so that neither names nor contents meet
a shell's quoting or a text encoding. An answer stands between two marks; `!N` in it is an error number.
"""

from __future__ import annotations

import base64
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from hermes_rl.errors import SandboxFailure

COMMON = rb"""exec 2>/dev/null  # bash tells there of what was killed
say() { printf '\n%s(' "$mark"; "$@"; printf ')%s\n' "$mark"; exit 0; }
fail() { say printf '!%s' "$1"; }
missing() {
  d=$1
  while [ ! -e "$d" ] && [ ! -L "$d" ] && [ "$d" != / ]; do d=$(dirname -- "$d"; echo .); d=${d%??}; done
  [ -d "$d" ] && fail 2
  fail 20
}
there() { [ -e "$1" ] || [ -L "$1" ] || missing "$1"; }
folders() { mkdir -p -- "$1" 2>/dev/null || { [ -e "$1" ] && [ ! -d "$1" ] && fail 17; fail 20; }; }
parent() { d=$(dirname -- "$1"; echo .); d=${d%??}; }
look='%f %s %Y'
"""

READ = rb"""there "$p"; [ -d "$p" ] && fail 21; [ -e "$p" ] || fail 2; [ -f "$p" ] || fail 22; [ -r "$p" ] || fail 13
[ "$(stat -Lc %s -- "$p")" -gt "$limit" ] && fail 27
say base64 -w0 -- "$p"
"""
WRITE = rb"""parent "$p"; folders "$d"; [ -d "$p" ] && fail 21
[ -e "$p" ] && [ -z "$mode" ] && keep=1
if [ "$more" = 1 ]; then base64 -d >>"$p" || fail 13; else base64 -d >"$p" || fail 13; fi
[ -n "$mode" ] && chmod "$mode" -- "$p"; [ -z "$mode$keep" ] && chmod 644 -- "$p"
say true
"""
STAT = rb"""if [ "$follow" = 1 ]; then [ -e "$p" ] || missing "$p"; say stat -L -c "$look" -- "$p"; fi
there "$p"; say stat -c "$look" -- "$p"
"""
LIST = rb"""there "$p"; [ -d "$p" ] || fail 20; [ -r "$p" ] || fail 13
list() { find "$p/" -mindepth 1 -maxdepth 1 -printf '%f\0%y\0%s\0%m\0%T@\0' | base64 -w0; }
say list
"""
CHMOD = rb"""there "$p"; chmod "$mode" -- "$p" 2>/dev/null || fail 1; say true
"""
MKDIR = rb"""folders "$p"; say true
"""
REMOVE = rb"""there "$p"; rm -rf -- "$p" 2>/dev/null || fail 13; say true
"""
RENAME = rb"""there "$p"; [ -d "$q" ] && fail 21; mv -fT -- "$p" "$q" 2>/dev/null || missing "$q"; say true
"""
PLACE = rb"""folders "${home:=$HOME}"
case $workdir in /*) ;; *) workdir=$home/$workdir ;; esac
folders "$workdir"
here() { printf %s "$home" | base64 -w0; }
say here
"""
OUTPUT = rb"""o=$box/$job
part() {
  n=$(stat -c %s -- "$1"); printf ' %s +' "$n"
  if [ "$n" -le "$limit" ]; then base64 -w0 -- "$1"; printf ' -'
  else head -c "$head" -- "$1" | base64 -w0; printf ' +'; tail -c "$tail" -- "$1" | base64 -w0; fi
}
"""
COMMAND = (
    OUTPUT
    + rb"""mkdir -p -- "$box"; cd -- "$cwd" 2>/dev/null || { [ -d "$cwd" ] && fail 13; missing "$cwd"; }
"""
)
RUN = (
    COMMAND
    + rb"""
: >"$o.e"
if [ -n "$apart" ]; then timeout -s KILL "$seconds" env "${vars[@]}" "${argv[@]}" <"$input" >"$o.o" 2>"$o.e"
else timeout -s KILL "$seconds" env "${vars[@]}" "${argv[@]}" <"$input" >"$o.o" 2>&1; fi
code=$?
result() { printf %s "$code"; part "$o.o"; part "$o.e"; rm -f -- "$o".*; }
say result
"""
)
SPAWN = (
    COMMAND
    + rb"""command -v -- "${argv[0]}" >/dev/null || fail 2
mkfifo "$o.i"; : >"$o.o"
sleep 1000000000 >"$o.i" 2>/dev/null </dev/null & echo $! >"$o.k"
{ setsid env "${vars[@]}" "${argv[@]}" <"$o.i" >"$o.o" 2>&1 & echo $! >"$o.p"; wait $!; echo $? >"$o.d"
  mv "$o.d" "$o.c"; kill $(cat "$o.k"); } </dev/null >/dev/null 2>&1 &
until [ -s "$o.p" ]; do sleep 0.01; done
say cat "$o.p"
"""
)
# A process may remove its working directory, so that nothing goes there to look at it.
POLL = (
    OUTPUT
    + rb"""result() { cat "$o.c" 2>/dev/null || printf -- -; part "$o.o"; }
say result
"""
)
FEED = rb"""o=$box/$job; [ -e "$o.c" ] && fail 32; base64 -d >"$o.i" || fail 32; say true
"""
HANG_UP = rb"""kill "$(cat "$box/$job.k")" 2>/dev/null; say true
"""
KILL = rb"""
for round in 1 2 3 4 5; do
  left=
  for f in /proc/[0-9]*; do
    if grep -qszxF -- "$named" "$f/environ"; then kill "-$signal" "${f#/proc/}" 2>/dev/null && left=1; fi
  done
  { [ -z "$left" ] || [ "$signal" != 9 ]; } && break
  sleep 0.05
done
[ -n "$folder" ] && rm -rf -- "$folder"
say true
"""


def quoted(value: str | bytes) -> bytes:
    """A value as one word of the shell."""
    data = os.fsencode(value) if isinstance(value, str) else value
    if b"\0" in data:
        raise ValueError("embedded null byte")
    return b"'" + data.replace(b"'", b"'\\''") + b"'"


def command(script: bytes, **values: str | bytes | list[str]) -> tuple[str, str]:
    """The command that runs a script with these variables, and the mark around its answer."""
    mark = secrets.token_hex(8)
    lines = [f"mark={mark}".encode()]
    for name, value in values.items():
        word = b"(" + b" ".join(map(quoted, value)) + b")" if isinstance(value, list) else quoted(value)
        lines.append(name.encode() + b"=" + word)
    text = base64.b64encode(b"\n".join([*lines, COMMON, script])).decode()
    return f'bash -c "$(echo {text} | base64 -d)"', mark


@contextmanager
def reading() -> Iterator[None]:
    """An answer is taken apart inside; one that makes no sense is a lost machine: its programs may be the agent's."""
    try:
        yield
    except ValueError as error:
        raise SandboxFailure(f"the sandbox answered what cannot be read: {error}") from error


def answer(output: str, mark: str) -> list[str]:
    """The words of an answer; raises the `OSError` that it tells of, `SandboxFailure` where there is none."""
    begin, end = output.rfind(f"{mark}("), output.rfind(f"){mark}")
    if begin < 0 or end < begin:
        raise SandboxFailure(f"the sandbox did not answer: {output[-500:]}")
    words = output[begin + len(mark) + 1 : end].split()
    if words and words[0].startswith("!"):
        with reading():
            number = int(words[0][1:])
        raise OSError(number, "Not a regular file" if number == 22 else os.strerror(number))
    return words
