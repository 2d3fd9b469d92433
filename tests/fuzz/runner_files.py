"""Any --config-file and any --hostfile is taken or refused with words. `make fuzz` gives this to libFuzzer, by atheris;
test_config_file.py and test_runner.py in tests/python give it corpus/runner_files and what hypothesis makes."""

import contextlib
import io
import os
import sys
import tempfile
from pathlib import Path


def check_config_file(text: bytes) -> None:
    """The options of such a file are a job that can be started, or a message says what is wrong."""
    from dcoll.runner import cli, config, options
    from dcoll.runner.hosts import UsageError

    with _file_of(text) as file, contextlib.redirect_stderr(io.StringIO()) as told:
        try:
            words = config.options_of(file)
            job = cli.job_from(options.parser().parse_args([*words, "-np", "2", "train.py"]))
        except UsageError as error:
            problem = str(error)
        except SystemExit:  # of argparse, with a message
            problem = told.getvalue()
        else:
            environment = {os.fsencode(name): os.fsencode(value) for name, value in job.exported.items()}
            assert not any(b"\0" in value for value in environment.values())
            return
        assert problem.startswith(f"--config-file {file}") or "dcollrun: error: argument " in problem, problem


def check_hostfile(text: bytes) -> None:
    """Such a file names hosts with slots, which -H takes too, or a message says what is wrong."""
    from dcoll.runner import hosts

    with _file_of(text) as file:
        try:
            found = hosts.parse_hostfile(file)
        except hosts.UsageError as error:
            found, problem = [], str(error)
    if not found:
        assert problem.startswith(f"--hostfile {file}"), problem
        return
    assert all(host.slots > 0 for host in found)
    assert hosts.parse_hosts(",".join(f"{host.name}:{host.slots}" for host in found)) == found
    assert sum(host.slots for host in hosts.fit(found, 1)) == 1


@contextlib.contextmanager
def _file_of(text: bytes):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        file.write_bytes(text)
        yield file


def main() -> None:
    """For libFuzzer: its options and folders are this program's arguments."""
    import atheris

    with atheris.instrument_imports(include=["dcoll.runner", "yaml"]):
        import yaml  # noqa: F401

        from dcoll.runner import cli, config, hosts, options  # noqa: F401

    def both(text: bytes) -> None:
        check_config_file(text)
        check_hostfile(text)

    atheris.Setup(sys.argv, both)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
