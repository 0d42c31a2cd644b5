"""A batch script for Slurm, whose tasks are the ranks.

Each rank is a task of srun, and not a process of torchrun. So Slurm's signal reaches the ranks themselves, and the
script sees their exit status. torchrun would end at a signal that it does not handle, and would return 1 for every
status. The script restarts the ranks of all nodes, as torchrun would.
"""

import math
import shlex
from pathlib import Path

from shardwright.report.launch.launch_description import QUOTED, Launch, folders_elsewhere, folders_written
from shardwright.report.launch.launch_options import limit_text

# The step whose tasks are the ranks. srun does not end ranks if another one ends: all of them leave by themselves
# within run.timeout_s, with a status that gives the reason.
_RUN = """
step=
asked=0
status=3 # until ranks have run
# A task is a rank.
rank='export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID GROUP_RANK=$SLURM_NODEID; exec "$@"'

run_ranks() { # sets status: that of the rank with the highest
    srun %(options)s \\
        bash -c "$rank" rank "${train[@]}" &
    step=$!
    ((asked == 0)) || kill -USR1 "$step" # asked while it began
    local seen=-1
    while ((seen != asked)); do # a signal ends wait before the ranks end
        seen=$asked
        wait "$step"
        status=$?
    done
    step=
}
"""

_ONCE = """
run_ranks
exit "$status"
"""

_AGAIN = """
# %(save_s)d s before the time limit Slurm signals this script, which asks the ranks to save and leave.
trap '((asked += 1)); [ -n "$step" ] && kill -USR1 "$step"' USR1

failures=()
while ((asked == 0)); do
    run_ranks
    case $status in
        0 | 2) exit "$status" ;; # done, or wrong input, which would come again
        3) asked=1 ;;            # preempted, and can go on
    esac
    ((asked == 0)) || break
    recent=()
    for at in "${failures[@]}"; do
        ((SECONDS - at < %(window_s)d)) && recent+=("$at")
    done
    failures=("${recent[@]}" "$SECONDS")
    ((${#failures[@]} <= %(most)d)) || exit "$status"
    echo "restart ${#failures[@]} of %(most)d within %(window_s)d s, after status $status" >&2
done
((status == 3 || status > 128)) || exit "$status" # they could not save
state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%%T)
if [ "$state" = RUNNING ]; then # and is not one that somebody has cancelled
    echo "to be continued: job $SLURM_JOB_ID goes back to the queue" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit 3
"""


def slurm_script(launch: Launch) -> str:
    """The script of a launch, for sbatch."""
    job, layout = launch.job, launch.layout
    train = shlex.join(["python", "-m", "shardwright", "train", *launch.words])
    lines = [
        "#!/bin/bash",
        f"# shardwright launch --slurm: {launch.heading}",
        QUOTED,
        *(f"#SBATCH --{line}" for line in directives(launch, launch.layout.ranks_per_server)),
        "",
        f"cd {shlex.quote(str(launch.folder))} || exit 2",
        "",
        "# All ranks meet at the first one, on the first node.",
        'read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        f"export MASTER_ADDR MASTER_PORT={launch.options.port}",
        f"export WORLD_SIZE={job.plan.world} LOCAL_WORLD_SIZE={layout.ranks_per_server}",
        *(f"export {name}={shlex.quote(value)}" for name, value in launch.links.variables.items()),
        *(f"# export {unset.variable}={unset.value}  # {unset.meaning}" for unset in launch.links.placeholders),
        "",
        *([] if launch.options.image else ["# python is that of the environment from which sbatch is called."]),
        f"train=({train})",
    ]
    if launch.options.image and (folders := folders_written(launch.job)):
        lines += ["", f"mkdir -p {shlex.join(folders)} # mounted into containers"]
    fields = {
        "options": " \\\n        ".join(_srun_options(launch)),
        "save_s": launch.save_s,
        "window_s": math.ceil(job.run.restart_window_s),
        "most": launch.max_restarts,
    }
    return "\n".join(lines) + "\n" + (_RUN + (_AGAIN if job.checkpoint.is_on else _ONCE)) % fields


def slurm_name(name: str) -> str:
    """The name of a job, in characters that Slurm and file names allow."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)[:128] or "job"


def directives(launch: Launch, tasks_per_node: int) -> list[str]:
    """The options of sbatch, as the script says them."""
    options, layout = launch.options, launch.layout
    words = [f"job-name={slurm_name(launch.job.name)}", f"nodes={layout.servers}"]
    words.append(f"ntasks-per-node={tasks_per_node}")
    if not launch.on_cpu:
        words.append(f"gpus-per-node={layout.ranks_per_server}")
    if layout.is_full and not launch.on_cpu:
        words += ["exclusive", "mem=0"]
    if layout.servers_per_node > 1:  # a block of Slurm's topology is a domain of fast links
        words.append(f"segment={layout.servers_per_node}")
    if options.limit_s:
        words.append(f"time={limit_text(options.limit_s)}")
    words += [f"{name}={getattr(options, name)}" for name in ("account", "partition") if getattr(options, name)]
    requeue_options = ["requeue", f"signal=B:USR1@{launch.save_s}"] if launch.saving is not None else ["no-requeue"]
    return [*words, "output=%x-%j.out", "open-mode=append", *requeue_options]


def _srun_options(launch: Launch) -> list[str]:
    return ["--distribution=block --cpu-bind=none --kill-on-bad-exit=0 --wait=0", *container_options(launch)]


def container_options(launch: Launch) -> list[str]:
    """The options of srun for containers of an image; none without one."""
    if not launch.options.image:
        return []
    mounts = ",".join(f"{folder}:{folder}" for folder in _mounted(launch))
    return [
        f"--container-image={shlex.quote(launch.options.image)}",
        f"--container-mounts={shlex.quote(mounts)}",
        f"--container-workdir={shlex.quote(str(launch.folder))}",
    ]


def _mounted(launch: Launch) -> list[str]:
    """Folders that a container sees: the folder in which the job is started, and those that the job names."""
    mounts = [str(launch.folder)]
    job_folder = [str(Path(launch.words[0]).parent)] if launch.words[0].endswith(".toml") else []
    for folder in (*job_folder, *folders_elsewhere(launch.job)):
        is_inside = any(Path(folder).is_relative_to(mount) for mount in mounts)
        if folder.startswith("/") and not is_inside:
            mounts.append(folder)
    return mounts
