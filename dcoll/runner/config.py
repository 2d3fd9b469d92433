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
_CONTROLLERS = {"mpi": "--mpi", "gloo": "--gloo", "jsrun": "--jsrun"}
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
        elif key == ("", "controller"):
            if value.lower() not in _CONTROLLERS:
                raise UsageError(f"{where}: controller is {value!r}, but must be mpi")
            words.append(_CONTROLLERS[value.lower()])
        elif flags := _FLAGS.get(key):
            if value.lower() not in _TRUE + _FALSE:
                raise UsageError(f"{where}: {key[1]} is {value!r}, but must be true or false")
            option = flags[value.lower() in _FALSE]
            words += [option] if option else []
        else:
            known = sorted(name for section, name in (*_VALUES, *_FLAGS, ("", "controller")) if section == key[0])
            allowed = ", ".join(known) or "the sections " + ", ".join(sorted({s for s, _ in _VALUES}))
            raise UsageError(f"{where}: no option {'.'.join(filter(None, key))!r}; allowed are {allowed}")
    return words


def _entries(path: Path) -> list[tuple[str, tuple[str, str], str]]:
    """(place, (section, key), value) of each option: a YAML mapping of sections, each a mapping of words to words."""
    import yaml

    def place(node: yaml.Node) -> str:
        return f"--config-file {path}, line {node.start_mark.line + 1}"

    def word(node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise UsageError(f"{place(node)}: a {node.id} stands where one word is expected; write 'key: value'")
        text = node.value.strip().replace("\n", " ")
        if not text.isprintable():
            raise UsageError(f"{place(node)}: {text!r} has characters that no option takes")
        return str(text)

    def pairs(node: yaml.Node) -> list[tuple[str, str, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            raise UsageError(f"{place(node)}: a {node.id} stands where 'key: value' is expected")
        return [(place(key), word(key).replace("_", "-"), value) for key, value in node.value]

    try:
        # Nodes, not objects: they know their lines, and every scalar is still as it was written.
        root = yaml.compose(path.read_bytes(), Loader=yaml.BaseLoader)
    except OSError as error:
        raise UsageError(f"--config-file {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:  # ValueError: \U of no character
        raise UsageError(f"--config-file {path} is not YAML: {' '.join(str(error).split())}") from None
    entries = []
    for where, key, value in pairs(root) if root is not None else []:
        if isinstance(value, yaml.MappingNode):
            entries += [(at, (key, name), word(leaf)) for at, name, leaf in pairs(value)]
        else:
            entries.append((where, ("", key), word(value)))
    return entries
