//! The processes of the demo: started with logs of their own, ended by their process ids, and no
//! process that somebody else started is ever touched.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, bail, ensure};
use tokio::{
    process::{Child, Command},
    time::{Instant, sleep, timeout_at},
};

/// How long a process may take to end when it was asked to.
const END_MAX: Duration = Duration::from_secs(6);

/// The folder that the demo makes below `--out`, and the files in it.
#[derive(Clone, Debug)]
pub struct Folders {
    pub out: PathBuf,
    pub work: PathBuf,
}

impl Folders {
    const MARK: &str = ".reach-demo";

    /// Makes `out`, or empties what an earlier demo left there. A folder with anything else in it
    /// is refused.
    pub fn make(out: &Path) -> anyhow::Result<Self> {
        let out = std::path::absolute(out)?;
        let mark = out.join(Self::MARK);
        if out.exists() && !mark.exists() {
            let empty = fs::read_dir(&out).with_context(|| format!("{}", out.display()))?.next().is_none();
            ensure!(
                empty,
                "{} is not empty and no demo made it: name another folder with --out",
                out.display()
            );
        }
        let work = out.join("work");
        if work.exists() {
            fs::remove_dir_all(&work).with_context(|| format!("can't empty {}", work.display()))?;
        }
        for report in ["REPORT.md", "report.html", crate::scribe::FILE]
            .map(|name| out.join(name))
            .iter()
            .filter(|path| path.exists())
        {
            fs::remove_file(report).with_context(|| format!("can't remove {}", report.display()))?;
        }
        for folder in ["home", "inbox", "logs", "jobs"] {
            fs::create_dir_all(work.join(folder))
                .with_context(|| format!("can't make {}", work.display()))?;
        }
        fs::write(mark, "Made by reach-demo, which empties this folder when it runs again.\n")?;
        Ok(Self { out, work })
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.work.join(name)
    }

    /// Of the cluster that `dev` makes.
    pub fn context(&self) -> PathBuf {
        self.work.join("home/contexts/dev")
    }

    pub fn log(&self, name: &str) -> PathBuf {
        self.work.join("logs").join(format!("{name}.log"))
    }
}

/// One process of ours.
#[derive(Debug)]
pub struct Member {
    pub name: String,
    pub pid: u32,
    /// What it is, for people.
    pub what: String,
    child: Child,
}

#[derive(Debug)]
pub struct Cast {
    pub folders: Folders,
    agent_reach: PathBuf,
    /// The processes go on when the demo is over.
    keep: bool,
    members: Vec<Member>,
    /// Ended with -9 by the demo itself.
    pub killed: BTreeSet<u32>,
}

impl Cast {
    pub fn new(folders: Folders, agent_reach: PathBuf, keep: bool) -> Self {
        Self { folders, agent_reach, keep, members: Vec::new(), killed: BTreeSet::new() }
    }

    /// The command line, with the demo's own home instead of the user's.
    pub fn agent_reach(&self) -> Command {
        let mut command = Command::new(&self.agent_reach);
        command.env("AGENT_REACH_HOME", self.folders.file("home"));
        for name in ["AGENT_REACH_CONTEXT", "AGENT_REACH_ENDPOINT", "AGENT_REACH_TOKEN"] {
            command.env_remove(name);
        }
        command
    }

    /// Runs the command line to its end.
    pub async fn run_agent_reach(&self, arguments: &[&str]) -> anyhow::Result<()> {
        let what = || format!("agent-reach {}", arguments.join(" "));
        let mut command = self.agent_reach();
        command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
        let output = tokio::time::timeout(Duration::from_secs(15), command.output()).await;
        let output = output.with_context(|| format!("{} does not end", what()))?;
        let output = output.with_context(|| format!("{} can't be started", self.agent_reach.display()))?;
        ensure!(output.status.success(), "{}: {}", what(), String::from_utf8_lossy(&output.stderr).trim());
        Ok(())
    }

    /// Another subcommand of this very program, as an agent of its own.
    pub fn myself(&self, id: &str, arguments: &[&str]) -> anyhow::Result<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(arguments)
            .args(["--id", id, "--context"])
            .arg(self.folders.context())
            .arg("--inbox")
            .arg(self.folders.work.join("inbox").join(id))
            .arg("--snapshot")
            .arg(self.folders.file("snapshot.json"))
            .arg("--ledger")
            .arg(self.folders.file("ledger.jsonl"))
            .arg("--out")
            .arg(&self.folders.out);
        if !self.keep {
            command.arg("--with-stdin");
        }
        Ok(command)
    }

    /// Starts `command` in a process group of its own, so that Ctrl-C reaches the demo alone and it
    /// can end the others in order.
    pub fn start(&mut self, name: &str, what: &str, mut command: Command) -> anyhow::Result<u32> {
        let log = File::options().create(true).append(true).open(self.folders.log(name))?;
        let input = if self.keep { Stdio::null() } else { Stdio::piped() };
        command.stdin(input).stdout(log.try_clone()?).stderr(log).process_group(0);
        let child = command.spawn().with_context(|| format!("{name} can't be started"))?;
        let pid = child.id().context("it ended before it began")?;
        // A killed run makes room for the next one of the same name.
        self.members.retain(|member| member.name != name);
        self.members.push(Member { name: name.into(), pid, what: what.into(), child });
        Ok(pid)
    }

    /// Ends a member that does not read its input, should this process die without having done so:
    /// the guard's own input ends with us, however that happens.
    pub fn guard(&mut self, name: &str) -> anyhow::Result<()> {
        let pid = self.member(name).with_context(|| format!("there is no {name} to guard"))?.pid;
        if !self.keep {
            let mut command = Command::new("sh");
            command.args(["-c", &format!("cat >/dev/null; kill -TERM {pid}; kill -CONT {pid}")]);
            self.start(&format!("{GUARD}{name}"), "ends it after us", command)?;
        }
        Ok(())
    }

    /// The guarded member is gone; its process id may soon be somebody else's.
    pub async fn unguard(&mut self, name: &str) {
        let guard = format!("{GUARD}{name}");
        if let Some(at) = self.members.iter().position(|member| member.name == guard) {
            let _ = self.members.swap_remove(at).child.kill().await;
        }
    }

    pub fn member(&self, name: &str) -> Option<&Member> {
        self.members.iter().find(|member| member.name == name)
    }

    pub fn pids(&self) -> Vec<u32> {
        self.members.iter().rev().map(|member| member.pid).collect()
    }

    /// Fails when a process that should run has ended, with its last words.
    pub fn check(&mut self) -> anyhow::Result<()> {
        for member in &mut self.members {
            if self.killed.contains(&member.pid) {
                continue;
            }
            if let Some(status) = member.child.try_wait()? {
                let log = self.folders.log(&member.name);
                let text = fs::read_to_string(&log).unwrap_or_default();
                let words = text.lines().last().unwrap_or("it said nothing").to_string();
                bail!("{} ended ({status}): {words}   (log: {})", member.name, log.display());
            }
        }
        Ok(())
    }

    /// `kill -9` or another signal, to a process that belongs to this demo.
    pub async fn kill(&mut self, signal: &str, pid: u32) -> anyhow::Result<()> {
        if signal == "-9" {
            self.killed.insert(pid);
        }
        send(signal, pid).await
    }

    /// Ends everything: the agents first, so that they can sign off, then the cluster. Says what had
    /// to be killed.
    pub async fn end(&mut self) -> Vec<String> {
        let mut remarks = Vec::new();
        while let Some(at) = self.members.iter().position(|member| member.name.starts_with(GUARD)) {
            let _ = self.members.swap_remove(at).child.kill().await;
        }
        let (cluster, agents): (Vec<_>, Vec<_>) =
            self.members.drain(..).partition(|member| member.name == CLUSTER);
        for group in [agents, cluster] {
            let mut group = group;
            for member in &mut group {
                // The end of its input ends one of ours, the signal the others.
                drop(member.child.stdin.take());
                if matches!(member.child.try_wait(), Ok(None)) {
                    let _ = send("-TERM", member.pid).await;
                    // It may be a stopped one.
                    let _ = send("-CONT", member.pid).await;
                }
            }
            let deadline = Instant::now() + END_MAX;
            for member in &mut group {
                if timeout_at(deadline, member.child.wait()).await.is_err() {
                    remarks.push(format!("{} (pid {}) did not end and was killed", member.name, member.pid));
                    let _ = member.child.kill().await;
                }
            }
        }
        remarks
    }
}

/// The member that runs `agent-reach dev`.
pub const CLUSTER: &str = "cluster";

const GUARD: &str = "guard-";

/// As anybody could type it.
async fn send(signal: &str, pid: u32) -> anyhow::Result<()> {
    let status = Command::new("sh")
        .args(["-c", &format!("kill {signal} {pid}")])
        .stderr(Stdio::null())
        .status()
        .await?;
    ensure!(status.success(), "kill {signal} {pid}: there is no such process");
    Ok(())
}

/// Asks again and again, until there is an answer or the time is over.
pub async fn until<T>(
    what: &str,
    within: Duration,
    every: Duration,
    mut ask: impl AsyncFnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let deadline = Instant::now() + within;
    loop {
        if let Some(answer) = ask().await? {
            return Ok(answer);
        }
        ensure!(Instant::now() < deadline, "{what}: not within {} s", within.as_secs());
        sleep(every).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_of_somebody_else_is_left_alone() {
        let place = tempfile::tempdir().unwrap();
        fs::write(place.path().join("mine"), "x").unwrap();
        let error = Folders::make(place.path()).unwrap_err().to_string();
        assert!(error.contains("--out"), "{error}");
        let out = place.path().join("out");
        let folders = Folders::make(&out).unwrap();
        fs::write(folders.file("ledger.jsonl"), "old").unwrap();
        fs::write(out.join("REPORT.md"), "old").unwrap();
        Folders::make(&out).unwrap();
        assert!(
            !folders.file("ledger.jsonl").exists() && !out.join("REPORT.md").exists(),
            "work begins anew"
        );
    }

    #[tokio::test]
    async fn a_member_that_ends_is_noticed_with_its_last_words() {
        let place = tempfile::tempdir().unwrap();
        let mut cast = Cast::new(Folders::make(&place.path().join("out")).unwrap(), "none".into(), false);
        let mut command = Command::new("sh");
        command.args(["-c", "echo all is lost; exit 3"]);
        cast.start("x", "a shell", command).unwrap();
        let second = Duration::from_secs(5);
        let noticed =
            until("the end", second, Duration::from_millis(5), async || Ok(cast.check().err())).await;
        let words = noticed.unwrap().to_string();
        assert!(words.contains("all is lost") && words.contains("exit status: 3"), "{words}");
    }

    #[tokio::test]
    async fn everything_that_was_started_ends() {
        let place = tempfile::tempdir().unwrap();
        let mut cast = Cast::new(Folders::make(&place.path().join("out")).unwrap(), "none".into(), false);
        let mut command = Command::new("sh");
        command.args(["-c", "cat; exit 0"]);
        cast.start("polite", "ends with its input", command).unwrap();
        let mut command = Command::new("sleep");
        command.arg("1000");
        let pid = cast.start("sleeper", "ends by a signal", command).unwrap();
        assert_eq!(cast.end().await, Vec::<String>::new());
        assert!(send("-0", pid).await.is_err(), "it is gone");
    }
}
