//! A process that was killed holds its folder and its ports until the system has cleared it away. Whoever
//! starts the next one by hand is often there before that.

use std::time::Duration;

use tokio::time::{Instant, sleep};

/// How long the end of who has it is waited for.
pub const HELD_MAX: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(20);

/// Tries again while the error says that somebody has it, for up to [`HELD_MAX`].
pub async fn when_free<T, E>(
    mut attempt: impl FnMut() -> Result<T, E>,
    is_held: impl Fn(&E) -> bool,
) -> Result<T, E> {
    let deadline = Instant::now() + HELD_MAX;
    loop {
        match attempt() {
            Err(error) if is_held(&error) && Instant::now() < deadline => sleep(POLL).await,
            answer => return answer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_held_is_waited_for_and_every_other_error_is_told_at_once() {
        let tried = std::cell::Cell::new(0);
        let attempt = async |free_at: u32, error| {
            tried.set(0);
            let attempt = || {
                tried.set(tried.get() + 1);
                if tried.get() < free_at { Err(error) } else { Ok(tried.get()) }
            };
            when_free(attempt, |error| *error == "held").await
        };
        assert_eq!(attempt(9, "damaged").await, Err("damaged"));
        assert_eq!(tried.get(), 1);
        assert_eq!(attempt(9, "held").await, Ok(9));
        let started = Instant::now();
        assert_eq!(attempt(u32::MAX, "held").await, Err("held"));
        assert!(started.elapsed() >= HELD_MAX, "{:?}", started.elapsed());
    }
}
