//! What it was measured on.

use std::{fmt, fs, path::Path};

use serde::Serialize;

#[derive(Clone, Debug, Serialize)]
pub struct Host {
    pub cores: usize,
    pub cpu: String,
    pub memory_gib: f64,
    pub kernel: String,
    /// Of the folder that servers keep their data in.
    pub file_system: String,
    /// Whether this program, and so the one it was built with, is without optimisation.
    pub debug_build: bool,
}

impl Host {
    pub fn of(data: &Path) -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let field = |text: &str, key: &str| {
            let line = text.lines().find(|line| line.starts_with(key)).unwrap_or_default();
            line.split_once(':').map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
        };
        let memory_kib = field(&read("/proc/meminfo"), "MemTotal").replace("kB", "");
        let data = data.canonicalize().unwrap_or_else(|_| data.to_owned());
        Self {
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            cpu: field(&read("/proc/cpuinfo"), "model name"),
            memory_gib: memory_kib.trim().parse::<f64>().unwrap_or_default() / f64::from(1 << 20),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            file_system: file_system(&read("/proc/self/mounts"), &data).unwrap_or("unknown").to_owned(),
            debug_build: cfg!(debug_assertions),
        }
    }

    /// What makes the figures worth less than they look.
    pub fn doubts(&self) -> Vec<&'static str> {
        let mut doubts = Vec::new();
        if self.debug_build {
            doubts.push("built with the dev profile: ours is slower than the product (use --release)");
        }
        if matches!(self.file_system.as_str(), "tmpfs" | "ramfs" | "overlay") {
            doubts.push(
                "the data folder's file system may not write to a disk: fsync may cost nothing (--data)",
            );
        }
        doubts
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cores, cpu, memory_gib, kernel, file_system, .. } = self;
        write!(f, "{cores} cores ({cpu}), {memory_gib:.0} GiB, Linux {kernel}, data on {file_system}")
    }
}

/// The type of the deepest mount that holds the folder; of two at the same place, the later.
fn file_system<'a>(mounts: &'a str, folder: &Path) -> Option<&'a str> {
    let mounts = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        Some((Path::new(fields.next()?), fields.next()?))
    });
    let holding = mounts.filter(|(at, _)| folder.starts_with(at));
    holding.max_by_key(|(at, _)| at.components().count()).map(|(_, kind)| kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deepest_mount_counts() {
        let mounts = "/dev/vda / ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\nx /tmpfile xfs rw 0 0\n";
        assert_eq!(file_system(mounts, Path::new("/tmp/a/b")), Some("tmpfs"));
        assert_eq!(file_system(mounts, Path::new("/tmpfile/a")), Some("xfs"));
        assert_eq!(file_system(mounts, Path::new("/home")), Some("ext4"));
        assert_eq!(file_system("", Path::new("/home")), None);
    }
}
