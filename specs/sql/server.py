"""A MariaDB of the runner's own, in which each rollout has a database and a user of its own."""

import os
import shutil
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hermes_rl import UserError

HOW = "apt install mariadb-server && pip install mysql-connector-python==9.7.0"
SECONDS = 30
"""For a statement, and for the server to start."""
KEEPER = (
    'folder=$1; shift; nice -n 5 "$@" </dev/null >"$folder/log" 2>&1 & read -r _; kill -KILL $!; wait; rm -rf "$folder"'
)
"""A shell's: it keeps the server for as long as the runner lives, which holds the other end of its input."""
SMALL = (
    "--innodb-log-file-size=4M",
    "--innodb-flush-method=nosync",
    "--skip-symbolic-links",
    "--innodb-file-per-table",
)
ALONE = (
    "--skip-networking",
    "--secure-file-priv=/dev/null",
    "--max-connections=500",
    f"--max-statement-time={SECONDS}",
    # What a session may ask for at most.
    *(f"--{kind}max-session-mem-used={256 << 20}" for kind in ("", "maximum-")),
    f"--maximum-max-heap-table-size={32 << 20}",
    f"--maximum-tmp-memory-table-size={32 << 20}",
    f"--maximum-sort-buffer-size={8 << 20}",
    f"--maximum-join-buffer-size={8 << 20}",
)
NAMES = ("--character-set-server=utf8mb4", "--collation-server=utf8mb4_general_ci")
RUNNING: dict[tuple[str, ...], "Server"] = {}
ONE_AT_A_TIME = threading.Lock()


def checkout(variable: str, repository: str, file: str) -> Path:
    """The folder of a repository, where all that its port needs is there."""
    folder = Path(os.environ.get(variable, "").strip() or ".")
    try:
        import mysql.connector  # noqa: F401

        program()
    except (ImportError, OSError) as error:
        raise UserError(f"there is no MariaDB to play it in: {HOW} ({error})") from error
    if not (folder / file).is_file():
        raise UserError(
            f"{variable} names no checkout: git clone https://github.com/{repository}, and let it name that folder; "
            f"it is played in a MariaDB: {HOW}"
        )
    return folder


def program() -> Path:
    """Where MariaDB's server is."""
    found = shutil.which("mariadbd", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))
    if found is None:
        raise FileNotFoundError("there is no program mariadbd")
    return Path(found)


class Server:
    """A server in a folder of its own, which nobody else can connect to, and which ends with the runner."""

    def __init__(self, options: tuple[str, ...]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hermes-sql-"))
        who = ["--user=root"] if os.geteuid() == 0 else []
        own = [f"--{kind}={self.folder / kind}" for kind in ("datadir", "tmpdir")]  # servers empty a folder for all
        command = [str(program()), "--no-defaults", *who, *SMALL, *options, *own]
        for kind in ("datadir", "tmpdir"):
            (self.folder / kind).mkdir(mode=0o700)
        made = subprocess.run([*command, "--bootstrap"], input=first_statements(), capture_output=True, check=False)
        if made.returncode:
            shutil.rmtree(self.folder)
            raise OSError(f"MariaDB does not start: {made.stderr.decode(errors='replace')[-1000:]}")
        command += [*ALONE, *NAMES, f"--socket={self.folder / 'socket'}"]
        self.keeper = subprocess.Popen(
            ["sh", "-c", KEEPER, "sh", str(self.folder), *command], stdin=subprocess.PIPE, start_new_session=True
        )
        self.wait()

    def wait(self) -> None:
        """Return as soon as it answers."""
        import mysql.connector

        for _ in range(SECONDS * 20):
            try:
                return self.connection(user="root").close()
            except mysql.connector.Error:
                time.sleep(0.05)
        raise OSError(f"MariaDB does not answer: {(self.folder / 'log').read_text(errors='replace')[-1000:]}")

    def connection(self, **who: Any) -> Any:
        """A connection of a user, in Python alone unless `use_pure` says otherwise."""
        import mysql.connector

        how = {
            "collation": "utf8mb4_general_ci",
            "use_pure": True,
            "read_timeout": 2 * SECONDS,
            "allow_local_infile": False,
        }
        return mysql.connector.connect(unix_socket=str(self.folder / "socket"), **(how | who))

    def execute(self, statements: Iterable[Any]) -> None:
        """Execute statements, or pairs of statement and values, as the one who may do everything."""
        with self.connection(user="root") as root, root.cursor() as cursor:
            for each in statements:
                cursor.execute(*(each if isinstance(each, tuple) else (each,)))
                if cursor.with_rows:
                    cursor.fetchall()
            root.commit()


def first_statements() -> bytes:
    """What makes the tables that a server needs for itself, from where MariaDB was installed."""
    share = program().resolve().parents[1] / "share"
    texts = []
    for part in ("system_tables", "performance_tables", "system_tables_data"):
        file = next((file for place in ("mysql", "mariadb") for file in (share / place).glob(f"m*_{part}.sql")), None)
        if file is None:
            raise FileNotFoundError(f"{share} has no {part}.sql of MariaDB's")
        texts.append(file.read_bytes())
    return b"\n".join([b"CREATE DATABASE mysql;", b"USE mysql;", *texts])


def running(options: tuple[str, ...]) -> Server:
    """The server with these options, which is started where there is none; forks of this process share it."""
    with ONE_AT_A_TIME:
        if options not in RUNNING:
            RUNNING[options] = Server(options)
        return RUNNING[options]


class Database:
    """A rollout's own, and its user, who may do there what they want and nothing elsewhere."""

    def __init__(self, name: str, statements: Iterable[Any], options: tuple[str, ...]) -> None:
        self.server, self.name = running(options), f"{name}_{uuid.uuid4().hex[:12]}"
        user = f"CREATE USER `{self.name}`@localhost", f"GRANT ALL ON `{self.name}`.* TO `{self.name}`@localhost"
        self.server.execute([f"CREATE DATABASE `{self.name}`", *user, f"USE `{self.name}`", *statements])
        self.opened: Any = None

    def connection(self, **how: Any) -> Any:
        """The agent's connection; a new one where that is broken, or is in another database."""
        import mysql.connector

        try:
            if self.opened is not None and self.opened.database == self.name:
                return self.opened
        except mysql.connector.Error:
            pass
        if self.opened is not None:
            self.server.execute([f"KILL USER `{self.name}`@localhost"])  # else what it waits for goes on
        self.opened = self.server.connection(user=self.name, database=self.name, **how)
        return self.opened

    def undo(self) -> None:
        """Take back what a statement has begun, where there is still a connection to do so."""
        import mysql.connector

        try:
            if self.opened is not None:
                self.opened.rollback()
        except mysql.connector.Error:
            self.opened.disconnect()

    def close(self) -> None:
        """Leave nothing of it."""
        whose = f"`{self.name}`@localhost"
        self.server.execute([f"KILL USER {whose}", f"DROP USER {whose}", f"DROP DATABASE IF EXISTS `{self.name}`"])
