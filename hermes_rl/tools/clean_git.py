"""git for commands that look at a repository of an agent, without running what the agent has configured there.

A repository's configuration names programs: file system monitors, filters, hooks, differs. Here `git` is a shell
function that reads the repository's objects, references and index through a folder of its own with a configuration of
its own; only keys that say how the repository is stored and compared are taken over. Nothing of a home or system is
read.
"""

from __future__ import annotations

import re
import secrets

_CORE = "repositoryformatversion|filemode|symlinks|ignorecase|autocrlf|eol"
KEPT = rf"^(core\.({_CORE})|extensions\.(objectformat|refstorage))$"
SETTINGS = {
    "safe.directory": "*",
    "core.fsmonitor": "false",
    "core.hooksPath": "/dev/null",
    "core.attributesFile": "/dev/null",
    "diff.ignoreSubmodules": "dirty",  # to look for changes there, git would run with their configuration
    "gc.auto": "0",
    "maintenance.auto": "false",
}
_VARIABLES = " ".join(
    f"GIT_CONFIG_KEY_{number}={name} GIT_CONFIG_VALUE_{number}='{value}'"
    for number, (name, value) in enumerate(SETTINGS.items())
)
PRELUDE = f"""
_clean_git=FOLDER
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_COUNT={len(SETTINGS)} {_VARIABLES}
export GIT_PAGER=cat GIT_EDITOR=: GIT_AUTHOR_NAME=agent GIT_COMMITTER_NAME=agent
export GIT_AUTHOR_EMAIL=agent@localhost GIT_COMMITTER_EMAIL=agent@localhost
git() {{
  if [ "$1" = -C ]; then ( cd "$2" && shift 2 && git "$@" ); return; fi
  _top=$(pwd -P)
  while [ -n "$_top" ] && [ ! -e "$_top/.git" ]; do _top=${{_top%/*}}; done
  if [ ! -d "$_top/.git" ] || [ -h "$_top/.git" ]; then HOME=$_clean_git command git "$@"; return; fi
  for _name in mkdir ln cp; do
    if ! command -v $_name >/dev/null; then HOME=$_clean_git command git "$@"; return; fi
  done
  _own=$_clean_git/$(set -f; IFS=/; set -- $_top; IFS=_; printf %s "$*")
  if [ ! -d "$_own" ]; then
    mkdir -p "$_own"
    for _name in objects refs packed-refs shallow info reftable; do
      if [ -e "$_top/.git/$_name" ]; then ln -s "$_top/.git/$_name" "$_own/$_name"; fi
    done
    for _name in HEAD index; do
      if [ -f "$_top/.git/$_name" ]; then cp "$_top/.git/$_name" "$_own/$_name"; fi
    done
    ( cd / && HOME=$_clean_git command git config --file "$_top/.git/config" --get-regexp '{KEPT}' ) |
    while read -r _key _value; do
      ( cd / && HOME=$_clean_git command git config --file "$_own/config" "$_key" "$_value" )
    done
  fi
  HOME=$_clean_git GIT_DIR=$_own GIT_WORK_TREE=$_top command git "$@"
}}
"""


def with_clean_git(command: str) -> str:
    """The command, with that function where it uses git at all.

    An image that lacks what making that folder takes has its own git with the settings alone.
    """
    if not re.search(r"(?<![\w.-])git\s", command):
        return command
    return PRELUDE.replace("FOLDER", f"/tmp/git-{secrets.token_hex(16)}") + command
