"""A SLURM of two machines on this one: its own daemons, each in a network namespace with a host name of its own."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support import networks

MACHINES = {"ctl": 0, "zeta": 1, "alpha": 2}  # nodes in the reverse order of their names
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
TIME_LIMIT = 300.0
CONFIG = """\
ClusterName=test
SlurmctldHost=ctl(10.231.7.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdTimeout=20
NodeName=zeta NodeAddr=10.231.7.2 CPUs=2 RealMemory=4000 Gres=gpu:1
NodeName=alpha NodeAddr=10.231.7.3 CPUs=2 RealMemory=4000 Gres=gpu:1
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def find_obstacle() -> str:
    """Returns why no SLURM can run here, or ''."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not installed: apt-get install slurmd slurmctld slurm-client munge"
    return networks.find_obstacle()


class Cluster:
    """`folder` holds its configuration and logs."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder, self.names = folder, names
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *words: str, **environ: str) -> str:
        """Runs a command where the controller runs. Returns its output."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.names[0], *words],
            check=False, capture_output=True, text=True, timeout=60, env={**self.environ, **environ},
        )  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def get_state(self, job: str) -> dict[str, str]:
        """Returns what scontrol says of a job, by name."""
        words = self.run("scontrol", "-o", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, is_there: Callable[[], bool], describe: Callable[[], object]) -> None:
        end = time.monotonic() + TIME_LIMIT
        while not is_there():
            assert time.monotonic() < end, describe()
            time.sleep(0.3)  # most looks start a program

    def read_logs(self) -> str:
        return "\n".join(f"{file.name}:\n{file.read_text()[-1500:]}" for file in sorted(self.folder.glob("*.log")))


@contextmanager
def start_cluster() -> Iterator[Cluster]:
    """The daemons end with the block; so do the names that it puts over /etc/hosts. Daemons have sockets in the folder,
    and Linux allows 107 characters for a socket's path: a longer one, as pytest's folders are under xdist, makes SLURM
    hold each job that it starts."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True))
        yield stack.enter_context(_start_daemons(Path(folder)))


@contextmanager
def _start_daemons(folder: Path) -> Iterator[Cluster]:
    for name in ("state", "spool-zeta", "spool-alpha"):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "nvidia0").touch()  # a plain file stands for a GPU
    (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/nvidia0\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    with ExitStack() as stack:
        names = stack.enter_context(networks.open_networks(len(MACHINES), lans=1))
        stack.callback(_kill_all, names)  # a daemon's end leaves the steps of its jobs running
        cluster = Cluster(folder, names)
        for name, host in zip(names, MACHINES, strict=True):
            place = Path("/etc/netns") / name
            place.mkdir(parents=True)
            stack.callback(shutil.rmtree, place)
            (place / "hosts").write_text(write_hosts(host))

        def start(name: str, command: list[str], host: str | None = None) -> None:
            inside = ["unshare", "--uts", "bash", "-c", 'hostname "$0"; exec "$@"', host, *command] if host else command
            words = ["ip", "netns", "exec", names[MACHINES[host]], *inside] if host else inside
            log = stack.enter_context(open(folder / f"{name}.log", "wb"))
            process = subprocess.Popen(words, stdout=log, stderr=log, env=cluster.environ)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)

        options = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "log-file": "munged.txt"}
        munge = [f"--{name}={folder / value}" for name, value in options.items()]
        start("munged", ["munged", "--foreground", "--force", *munge, f"--seed-file={folder}/seed"])
        cluster.wait((folder / "munge.socket").exists, cluster.read_logs)
        start("slurmctld", ["slurmctld", "-D"], "ctl")
        for node in ("zeta", "alpha"):
            start(node, ["slurmd", "-D", "-N", node], node)

        def is_idle() -> bool:
            try:
                lines = cluster.run("sinfo", "-h", "-N", "-o", "%T").split()
            except AssertionError:
                return False
            return lines == ["idle", "idle"]

        cluster.wait(is_idle, cluster.read_logs)
        yield cluster


def write_hosts(own: str) -> str:
    """Returns a node's hosts file, in which its own name means 127.0.1.1, as on Debian. The controller's daemon listens
    by that name, so its own has the address."""
    addresses = {name: f"10.231.7.{at + 1}" for name, at in MACHINES.items()}
    addresses |= {own: "127.0.1.1"} if own != "ctl" else {}
    return "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in addresses.items())


def _kill_all(names: list[str]) -> None:
    """Kills what runs in the namespaces."""
    for name in names:
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True).stdout
        for process in listed.split():
            try:
                os.kill(int(process), signal.SIGKILL)
            except ProcessLookupError:
                continue
