# Remove from the git repositories of a directory all that their HEAD does not reach; the set-up of `sandbox.scrub_git`.
set -eu
fail() { echo "sandbox.scrub_git: $*" >&2; exit 1; }
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=core.hooksPath GIT_CONFIG_VALUE_0=/dev/null GIT_NO_REPLACE_OBJECTS=1
command -v git >/dev/null || fail "the sandbox has no git"
here=$(git -c safe.directory='*' rev-parse --absolute-git-dir 2>/dev/null) || fail "$PWD is in no git repository"
lists=$(mktemp -d)
unreached() {
    git cat-file --batch-all-objects --batch-check='%(objectname)' | LC_ALL=C sort -u >"$lists/all"
    git rev-list --objects HEAD | cut -d' ' -f1 | LC_ALL=C sort -u >"$lists/reached"
    LC_ALL=C comm -23 "$lists/all" "$lists/reached" >"$lists/left"
    [ -s "$lists/left" ]
}
scrub() {
    export GIT_DIR=$1
    [ ! -e "$GIT_DIR/commondir" ] && [ ! -e "$GIT_DIR/worktrees" ] || fail "$GIT_DIR has linked worktrees"
    git rev-parse --verify -q 'HEAD^{commit}' >/dev/null || fail "$GIT_DIR has no commit"
    rm -f "$GIT_DIR/info/grafts"
    git for-each-ref --format='%(objecttype) %(objectname) %(refname)' >"$lists/refs"
    while read -r type id ref; do
        [ "$type" = commit ] && git merge-base --is-ancestor "$id" HEAD || git update-ref --no-deref -d "$ref"
    done <"$lists/refs"
    rm -rf "$GIT_DIR/logs" "$GIT_DIR"/*MSG "$GIT_DIR/lost-found" "$GIT_DIR"/rebase-* "$GIT_DIR/sequencer" "$GIT_DIR/rr-cache"
    find "$GIT_DIR" -maxdepth 1 -name '*_HEAD' -exec rm -f {} +
    [ ! -e "$GIT_DIR/index" ] || git read-tree HEAD
    if unreached; then
        find "$GIT_DIR/objects" \( -name '*.keep' -o -name '*.bitmap' -o -path '*/info/commit-graph*' \) -exec rm -rf {} +
        git repack -a -d -q
        rm -f "$GIT_DIR/objects/info/alternates"
        git prune --expire=now
        ! unreached || fail "$GIT_DIR still has $(wc -l <"$lists/left") objects that HEAD does not reach"
    fi
}
echo "$here" >"$lists/repositories"
find . -type d -name objects -prune >"$lists/found"
while read -r objects; do
    [ ! -e "${objects%/*}/HEAD" ] || (cd "${objects%/*}" && pwd -P) >>"$lists/repositories"
done <"$lists/found"
LC_ALL=C sort -u "$lists/repositories" >"$lists/each"
while read -r repository; do scrub "$repository"; done <"$lists/each"
rm -rf "$lists"
