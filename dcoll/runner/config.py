"""--config-file: horovodrun's YAML file of options, as options of the command line."""

from pathlib import Path

from dcoll.runner.hosts import UsageError

# (section, key) -> the option with a value, or the options of true and false.
_VALUES = {
    ("params", "fusion-threshold-mb"): "--fusion-threshold-mb",
    ("params", "cycle-time-ms"): "--cycle-time-ms",
    ("params", "cache-capacity"): "--cache-capacity",
    ("autotune", "log-file"): "--autotune-log-file",
    ("autotune", "warmup-samples"): "--autotune-warmup-samples",
    ("autotune", "steps-per-sample"): "--autotune-steps-per-sample",
    ("autotune", "bayes-opt-max-samples"): "--autotune-bayes-opt-max-samples",
    ("autotune", "gaussian-process-noise"): "--autotune-gaussian-process-noise",
    ("timeline", "filename"): "--timeline-filename",
    ("stall-check", "warning-time-seconds"): "--stall-check-warning-time-seconds",
    ("stall-check", "shutdown-time-seconds"): "--stall-check-shutdown-time-seconds",
    ("library-options", "num-nccl-streams"): "--num-nccl-streams",
    ("library-options", "thread-affinity"): "--thread-affinity",
    ("library-options", "gloo-timeout-seconds"): "--gloo-timeout-seconds",
    ("library-options", "mpi-args"): "--mpi-args",
    ("library-options", "binding-args"): "--binding-args",
    ("logging", "level"): "--log-level",
}
_FLAGS = {
    ("", "verbose"): ("--verbose", None),
    ("params", "hierarchical-allreduce"): ("--hierarchical-allreduce", "--no-hierarchical-allreduce"),
    ("params", "hierarchical-allgather"): ("--hierarchical-allgather", "--no-hierarchical-allgather"),
    ("params", "torus-allreduce"): ("--torus-allreduce", "--no-torus-allreduce"),
    ("autotune", "enabled"): ("--autotune", "--no-autotune"),
    ("timeline", "mark-cycles"): ("--timeline-mark-cycles", "--no-timeline-mark-cycles"),
    ("stall-check", "enabled"): ("--stall-check", "--no-stall-check"),
    ("library-options", "mpi-threads-disable"): ("--mpi-threads-disable", "--no-mpi-threads-disable"),
    ("logging", "hide-timestamp"): ("--log-hide-timestamp", "--no-log-hide-timestamp"),
    ("logging", "with-timestamp"): ("--log-with-timestamp", "--log-without-timestamp"),
}
_TRUE = ("true", "yes", "on", "1", "2")
_FALSE = ("false", "no", "off", "0")
_NOTHING = ("", "~", "null")


def options_of(path: Path) -> list[str]:
    """The file's options, to be written before those of the command line, which count more."""
    words: list[str] = []
    for where, key, value in _entries(path):
        if value in _NOTHING:
            continue
        if where_key := _VALUES.get(key):
            words.append(f"{where_key}={value}")
        elif flags := _FLAGS.get(key):
            if value.lower() not in _TRUE + _FALSE:
                raise UsageError(f"{where}: {key[1]} is {value!r}, but must be true or false")
            option = flags[value.lower() in _FALSE]
            words += [option] if option else []
        else:
            known = sorted(name for section, name in (*_VALUES, *_FLAGS) if section == key[0])
            allowed = ", ".join(known) or "the sections " + ", ".join(sorted({s for s, _ in _VALUES}))
            raise UsageError(f"{where}: no option {'.'.join(filter(None, key))!r}; allowed are {allowed}")
    return words


def _entries(path: Path) -> list[tuple[str, tuple[str, str], str]]:
    """(place, (section, key), value) of each line. Of YAML: mappings two deep of words, quoted or not, and comments."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UsageError(f"--config-file {path} cannot be read: {error.strerror}") from None
    entries = []
    section = ""
    for number, line in enumerate(lines, 1):
        text = _without_comment(line)
        if not text.strip() or text.strip() == "---":
            continue
        where = f"--config-file {path}, line {number}"
        name, colon, value = text.strip().partition(":")
        if not colon or text.strip().startswith("-") or "\t" in text[: len(text) - len(text.lstrip())]:
            raise UsageError(f"{where}: {line.strip()!r} is not 'key: value'")
        key = name.strip().strip("'\"").replace("_", "-")
        if text[0] != " ":
            section = key if not value.strip() else ""
        if value.strip() or text[0] == " ":
            entries.append((where, (section, key), _scalar(value.strip())))
    return entries


def _without_comment(line: str) -> str:
    quote = ""
    for i, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and (i == 0 or line[i - 1].isspace()):
            return line[:i].rstrip()
    return line.rstrip()


def _scalar(text: str) -> str:
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" else text
