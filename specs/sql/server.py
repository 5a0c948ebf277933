"""A MariaDB for each rollout, in the sandbox of the rollout's state, whose limits bound its files and processor time.

What an agent does to its server, such as filling the disk, costs its own rollout alone: it reads the server's error.
"""

import io
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from hermes_rl import UserError

HOW = "apt install mariadb-server && pip install mysql-connector-python==9.7.0"
SECONDS = 30
"""For a statement, and for the server to start."""
MEMORY = 512 << 20
"""Maximum bytes of a server's memory. Its files are in the sandbox's 64 MiB, of which a new server needs 20."""
SMALL = (
    "--innodb-data-file-path=ibdata1:5M:autoextend",
    "--innodb-temp-data-file-path=ibtmp1:3M:autoextend",
    "--innodb-autoextend-increment=1",
    "--innodb-log-file-size=4M",
    "--innodb-buffer-pool-size=16M",
    "--innodb-flush-method=nosync",
    "--innodb-use-native-aio=0",
    "--skip-innodb-doublewrite",
    "--skip-symbolic-links",
    "--innodb-file-per-table",
)
ALONE = (
    "--skip-networking",
    "--secure-file-priv=/dev/null",
    f"--max-statement-time={SECONDS}",
    # What a session may ask for at most.
    *(f"--{kind}max-session-mem-used={256 << 20}" for kind in ("", "maximum-")),
    f"--maximum-max-heap-table-size={32 << 20}",
    # In memory, the addresses of rows would order rows that are equal.
    *(f"--{kind}tmp-memory-table-size=0" for kind in ("", "maximum-")),
    f"--maximum-sort-buffer-size={8 << 20}",
    f"--maximum-join-buffer-size={8 << 20}",
)
NAMES = ("--character-set-server=utf8mb4", "--collation-server=utf8mb4_general_ci")
SHOWN = [f"{sys.prefix}/bin", "/usr/sbin", "/usr/local/sbin", "/usr/bin", "/usr/local/bin"]
"""Directories of programs that a sandbox shows."""


def checkout(variable: str, repository: str, file: str) -> Path:
    """Return the directory of a repository; raise `UserError` if its port cannot run."""
    directory = Path(os.environ.get(variable, "").strip() or ".")
    try:
        import mysql.connector  # noqa: F401

        program()
    except (ImportError, OSError) as error:
        raise UserError(f"MariaDB is not available: {HOW} ({error})") from error
    if not (directory / file).is_file() or not directory.is_absolute():
        raise UserError(
            f"{variable} names no checkout: git clone https://github.com/{repository}, and set it to the absolute "
            f"path of that directory; the tasks run in MariaDB: {HOW}"
        )
    return directory


def program() -> Path:
    """Return the path of MariaDB's server."""
    path = shutil.which("mariadbd", path=os.pathsep.join(SHOWN))
    if path is None:
        raise FileNotFoundError(f"there is no program mariadbd in {', '.join(SHOWN)}")
    return Path(path)


def command(directory: Path, options: Iterable[str]) -> list[str]:
    """Return the command of a server whose files are in this directory."""
    user = ["--user=root"] if os.geteuid() == 0 else []
    files = [f"--{kind}={directory / kind}" for kind in ("datadir", "tmpdir")]
    return [str(program()), "--no-defaults", *user, *SMALL, *options, *files]


@cache
def new_files(options: tuple[str, ...]) -> bytes:
    """Return an archive of the files of a new server with these options; forks of this process share it."""
    with tempfile.TemporaryDirectory() as directory, io.BytesIO() as archive:
        for kind in ("datadir", "tmpdir"):
            Path(directory, kind).mkdir(mode=0o700)
        bootstrap = [*command(Path(directory), options), "--bootstrap"]
        done = subprocess.run(bootstrap, input=first_statements(), capture_output=True, check=False)
        if done.returncode:
            raise OSError(f"MariaDB does not start: {done.stderr.decode(errors='replace')[-1000:]}")
        with tarfile.open(fileobj=archive, mode="w") as files:
            files.add(directory, ".")
        return archive.getvalue()


class Server:
    """A server in its own directory, which no other process can connect to."""

    def __init__(self, options: tuple[str, ...]) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="sql-"))
        with tarfile.open(fileobj=io.BytesIO(new_files(options))) as files:
            files.extractall(self.directory, filter="data")
        starting = [*command(self.directory, options), *ALONE, *NAMES, f"--socket={self.directory / 'socket'}"]
        with (self.directory / "log").open("w") as log:
            self.process = subprocess.Popen(starting, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        resource.prlimit(self.process.pid, resource.RLIMIT_DATA, (MEMORY, MEMORY))
        self.wait()

    def wait(self) -> None:
        """Return as soon as it accepts connections."""
        import mysql.connector

        for _ in range(SECONDS * 100):
            try:
                return self.connection(user="root").close()
            except mysql.connector.Error:
                if self.process.poll() is not None:
                    break
                time.sleep(0.01)
        raise OSError(f"MariaDB does not answer: {(self.directory / 'log').read_text(errors='replace')[-1000:]}")

    def connection(self, **credentials: Any) -> Any:
        """Return a connection of a user, in Python alone unless `use_pure` is false."""
        import mysql.connector

        how = {
            "collation": "utf8mb4_general_ci",
            "use_pure": True,
            "read_timeout": SECONDS + 5,  # a session may lift the limit of its statements
            "allow_local_infile": False,
        }
        return mysql.connector.connect(unix_socket=str(self.directory / "socket"), **(how | credentials))

    def execute(self, statements: Iterable[Any]) -> None:
        """Execute statements, or pairs of statement and values, as the one who may do everything."""
        with self.connection(user="root") as root, root.cursor() as cursor:
            for each in statements:
                cursor.execute(*(each if isinstance(each, tuple) else (each,)))
                if cursor.with_rows:
                    cursor.fetchall()
            root.commit()

    def close(self) -> None:
        """End it, and remove its files."""
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.directory)


def first_statements() -> bytes:
    """Return the statements that make the tables a server needs for itself, from where MariaDB was installed."""
    share = program().resolve().parents[1] / "share"
    texts = []
    for part in ("system_tables", "performance_tables", "system_tables_data"):
        file = next(
            (file for directory in ("mysql", "mariadb") for file in (share / directory).glob(f"m*_{part}.sql")), None
        )
        if file is None:
            raise FileNotFoundError(f"{share} has no {part}.sql of MariaDB's")
        texts.append(file.read_bytes())
    return b"\n".join([b"CREATE DATABASE mysql;", b"USE mysql;", *texts])


class Database:
    """A database on its own server, and the agent's user, who has all rights there and none elsewhere."""

    def __init__(self, name: str, statements: Iterable[Any], options: tuple[str, ...]) -> None:
        self.server, self.name = Server(options), name
        user = "CREATE USER agent@localhost", f"GRANT ALL ON `{name}`.* TO agent@localhost"
        self.server.execute([f"CREATE DATABASE `{name}`", *user, f"USE `{name}`", *statements])
        self.opened: Any = None

    def connection(self, **how: Any) -> Any:
        """Return the agent's connection; a new one if that is broken, or is in another database."""
        import mysql.connector

        try:
            if self.opened is not None and self.opened.database == self.name:
                return self.opened
        except mysql.connector.Error:
            pass
        if self.opened is not None:
            self.server.execute(["KILL USER agent@localhost"])  # otherwise the statement continues to run
        self.opened = self.server.connection(user="agent", database=self.name, **how)
        return self.opened

    def undo(self, error: Exception) -> None:
        """Roll back a statement's changes, if a connection exists that does not wait for its result."""
        import mysql.connector

        try:
            if isinstance(error, mysql.connector.errors.ReadTimeoutError):
                self.opened.disconnect()
            elif self.opened is not None:
                self.opened.rollback()
        except mysql.connector.Error:
            self.opened.disconnect()

    def close(self) -> None:
        """End the server."""
        self.server.close()
