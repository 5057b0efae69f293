//! Server processes: how they are started and ended, and what the kernel says they used.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, bail};
use reach_config::ports::Stretch;

/// The servers of one cluster, in order, and the folder that holds everything of theirs. Dropping
/// it ends them and removes the folder.
#[derive(Debug)]
pub struct Servers {
    children: Vec<Option<Child>>,
    dir: tempfile::TempDir,
}

impl Servers {
    /// None yet; their folder is made in `data`.
    pub fn none(data: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(data).with_context(|| format!("cannot make {}", data.display()))?;
        let dir = tempfile::Builder::new().prefix("reach-bench.").tempdir_in(data)?;
        Ok(Self { children: Vec::new(), dir })
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Starts one more; what it says goes to a file that [`Servers::logs`] reads.
    pub fn spawn(&mut self, program: &Path, args: &[String]) -> anyhow::Result<()> {
        let log = File::create(self.log(self.children.len()))?;
        let child = tied(program)
            .args(args)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot start {} (with setpriv, of util-linux)", program.display()))?;
        self.children.push(Some(child));
        Ok(())
    }

    /// `kill -9`.
    pub fn kill(&mut self, server: usize) -> anyhow::Result<()> {
        let mut child = self.children[server].take().context("it was killed before")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    pub fn pids(&self) -> Vec<u32> {
        self.children.iter().flatten().map(Child::id).collect()
    }

    /// Fails when one of them has ended by itself.
    pub fn all_run(&mut self) -> anyhow::Result<()> {
        for (i, child) in self.children.iter_mut().enumerate() {
            if let Some(status) = child.as_mut().map(Child::try_wait).transpose()?.flatten() {
                let log = fs::read_to_string(self.dir.path().join(format!("server-{i}.log")));
                bail!("server {i} ended by itself, {status}:\n{}", tail(&log.unwrap_or_default()));
            }
        }
        Ok(())
    }

    fn log(&self, server: usize) -> PathBuf {
        self.dir.path().join(format!("server-{server}.log"))
    }

    /// The last lines of all of them.
    pub fn logs(&self) -> String {
        let text = |i| fs::read_to_string(self.log(i)).unwrap_or_default();
        (0..self.children.len()).map(|i| format!("--- server {i}\n{}\n", tail(&text(i)))).collect()
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        for child in self.children.iter_mut().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(10)..].join("\n")
}

/// Ports of loopback that nobody uses now, and which are not handed out to anybody else: a server that was
/// killed finds its own free when it is started again. The nine after each are as free.
pub fn free_ports(count: usize) -> anyhow::Result<Vec<u16>> {
    let stretch = Stretch::of_this_process()?;
    Ok((0..count).map(|_| stretch.take()).collect::<Result<_, _>>()?)
}

/// A program that ends with this process, whatever happens to it: setpriv becomes the program.
pub fn tied(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// CPU time that these processes have used so far, user and system.
pub fn cpu(pids: &[u32]) -> anyhow::Result<Duration> {
    let hertz = rustix::param::clock_ticks_per_second();
    let ticks = |pid: &u32| -> anyhow::Result<u64> {
        let path = format!("/proc/{pid}/stat");
        let stat = fs::read_to_string(&path).with_context(|| format!("{path}: the process is gone"))?;
        cpu_ticks(&stat).with_context(|| format!("{path} has another form than expected"))
    };
    let ticks: u64 = pids.iter().map(ticks).sum::<anyhow::Result<_>>()?;
    Ok(Duration::from_secs_f64(ticks as f64 / hertz as f64))
}

/// `utime` and `stime`, which are the 14th and the 15th field; the second, the name, may hold
/// anything, blanks and brackets too.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut fields = after_name.split_ascii_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

/// Memory of one process in MiB.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Memory {
    pub resident: f64,
    /// The most since the start, or since [`reset_peak`].
    pub peak: f64,
}

pub fn memory(pid: u32) -> anyhow::Result<Memory> {
    let path = format!("/proc/{pid}/status");
    let status = fs::read_to_string(&path).with_context(|| format!("{path}: the process is gone"))?;
    parse_memory(&status).with_context(|| format!("{path} has another form than expected"))
}

fn parse_memory(status: &str) -> Option<Memory> {
    let mib = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
        let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib / 1024.0)
    };
    Some(Memory { resident: mib("VmRSS")?, peak: mib("VmHWM")? })
}

/// The peak is counted from now on.
pub fn reset_peak(pid: u32) -> anyhow::Result<()> {
    fs::write(format!("/proc/{pid}/clear_refs"), "5").context("cannot reset a peak of memory")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_name_with_brackets_and_blanks_does_not_shift_the_fields() {
        let stat = "4711 (a) b (c)) S 1 2 3 4 5 6 7 8 9 10 250 50 13 14 20 0 4 0 99";
        assert_eq!(cpu_ticks(stat), Some(300));
        assert_eq!(cpu_ticks("4711 (a) S 1 2"), None);
    }

    #[test]
    fn memory_is_read_in_mib() {
        let status = "Name:\tx\nVmPeak:\t  99999 kB\nVmHWM:\t  4096 kB\nVmRSS:\t    1536 kB\n";
        assert_eq!(parse_memory(status), Some(Memory { resident: 1.5, peak: 4.0 }));
        assert_eq!(parse_memory("Name:\tx\n"), None);
    }

    #[test]
    fn this_process_uses_cpu_and_memory() {
        let pid = std::process::id();
        let before = cpu(&[pid]).unwrap();
        while cpu(&[pid]).unwrap() == before {
            std::hint::black_box(memory(pid).unwrap());
        }
        let memory = memory(pid).unwrap();
        assert!(memory.resident > 0.5 && memory.peak >= memory.resident * 0.5, "{memory:?}");
    }
}
