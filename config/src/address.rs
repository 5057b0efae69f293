//! Where something can be dialled: a host, by name or by number, and a port.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

/// Written `HOST:PORT`, an IPv6 number in brackets. A name is looked up by whoever dials.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    host: String,
    port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not an address: write HOST:PORT, such as 10.20.1.15:7481 or n1.example.org:7481")]
pub struct BadAddress {
    text: String,
}

impl Address {
    /// `host` without brackets.
    pub fn new(host: &str, port: u16) -> Result<Self, BadAddress> {
        let named = (1..=253).contains(&host.len())
            && host.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_'));
        if port == 0 || !(named || host.parse::<IpAddr>().is_ok()) {
            return Err(BadAddress { text: format!("{host}:{port}") });
        }
        Ok(Self { host: host.to_string(), port })
    }

    pub fn host(&self) -> &str {
        &self.host
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// When the host is a number, or the name that every machine has for itself.
    pub fn ip(&self) -> Option<IpAddr> {
        match self.host.as_str() {
            "localhost" => Some(IpAddr::from([127, 0, 0, 1])),
            host => host.parse().ok(),
        }
    }

    pub fn is_loopback(&self) -> bool {
        self.ip().is_some_and(|ip| ip.is_loopback())
    }
}

impl From<SocketAddr> for Address {
    fn from(addr: SocketAddr) -> Self {
        Self { host: addr.ip().to_string(), port: addr.port() }
    }
}

impl FromStr for Address {
    type Err = BadAddress;

    fn from_str(text: &str) -> Result<Self, BadAddress> {
        let bad = || BadAddress { text: text.to_string() };
        let (host, port) = text.rsplit_once(':').ok_or_else(bad)?;
        let host = match host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            Some(number) if number.contains(':') => number,
            Some(_) => return Err(bad()),
            None if host.contains(':') => return Err(bad()),
            None => host,
        };
        Self::new(host, port.parse().map_err(|_| bad())?).map_err(|_| bad())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => f.pad(&format!("[{}]:{}", self.host, self.port)),
            false => f.pad(&format!("{}:{}", self.host, self.port)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked_at_the_edge() {
        for good in ["127.0.0.1:7481", "n1.example.org:1", "[::1]:7481", "localhost:65535"] {
            assert_eq!(good.parse::<Address>().unwrap().to_string(), good);
        }
        for bad in
            ["", "n1", "n1:", ":7481", "n1:0", "n1:65536", "::1:7481", "[n1]:7481", "a b:1", "http://n1:1"]
        {
            assert!(bad.parse::<Address>().is_err(), "{bad}");
        }
        assert!("localhost:1".parse::<Address>().unwrap().is_loopback());
        assert!(!"n1:1".parse::<Address>().unwrap().is_loopback());
    }
}
