//! The host's half against every interleaving with a small model of a device, and against real devices for many
//! launches.

use super::*;
use crate::cuda::launch::{Arg, KernelKey, Launch, Lowered};
use crate::cuda::record::Step;
use crate::graph::{RecordOptions, Recorded};
use crate::{Device, DeviceChoice, OpenArena};

fn limits(rows: u32) -> StepLimits {
    StepLimits {
        seats: rows,
        rows,
        tokens: rows,
        pages_per_seat: 1,
        page_size: 16,
        vocab: 32,
        penalties: false,
        tokens_per_row: 1,
        tables: 1,
    }
}

/// Row `index` of the mail for launch `n`; different for every launch, so that a word of another launch is noticed.
fn payload(n: u64, index: u32) -> MailRow {
    let seat = (n as u32).wrapping_mul(2_654_435_761).wrapping_add(index);
    MailRow { seat, q_len: seat ^ 0x5555_5555, flags: seat.rotate_left(7) }
}

/// The device's answer to a row.
fn answer(row: MailRow) -> u32 {
    row.seat.wrapping_add(row.q_len.rotate_left(11)) ^ row.flags
}

fn send(mail: &mut MailBank<impl Words>, launch: u64, confirmed: u64, rows: u32) -> Result<()> {
    let mut letter = mail.open(launch, confirmed)?;
    let rows: Vec<MailRow> = (0..rows).map(|index| payload(launch, index)).collect();
    letter.rows(&rows)?;
    letter.send();
    Ok(())
}

/// How many tokens the device answers with: one, or none to as many as there are places.
fn count(limits: &StepLimits, launch: u64, index: u32) -> u32 {
    match limits.tokens_per_row {
        1 => 1,
        places => (launch as u32 * 7 + index * 3) % (places + 1),
    }
}

fn verify(limits: &StepLimits, entry: Entry<'_>, rows: u32) {
    assert_eq!(entry.rows, rows);
    for index in 0..rows {
        let found: Vec<_> = entry.row(index).map(|place| (place.token, place.flags)).collect();
        let token = answer(payload(entry.launch, index));
        let count = count(limits, entry.launch, index);
        let wanted = (0..count).map(|place| (token.wrapping_add(place), ring::SAMPLED));
        assert_eq!(found, wanted.collect::<Vec<_>>(), "launch {}", entry.launch);
    }
}

/// The device's half on shared words, as a kernel would do it.
fn device_step<W: Words>(limits: &StepLimits, banks: &[W; 2], out: &W, launch: u64, idle: fn()) {
    let bank = &banks[(launch % 2) as usize];
    while bank.get(header::LAUNCH_LO, Ordering::Acquire) != launch as u32 {
        idle();
    }
    let layout = limits.mail_layout();
    let rows = bank.get(header::ROWS, Ordering::Relaxed);
    let at = (launch % u64::from(ring::ENTRIES)) as u32 * limits.ring_entry_words();
    for index in 0..rows {
        let word = |k| bank.get(layout.rows + 3 * index + k, Ordering::Relaxed);
        let read = MailRow { seat: word(0), q_len: word(1), flags: word(2) };
        let to = at + ring::HEADER_WORDS + index * limits.ring_row_words();
        let count = count(limits, launch, index);
        for place in 0..count {
            let to = to + place * ring::PLACE_WORDS;
            out.set(to, answer(read).wrapping_add(place), Ordering::Relaxed);
            out.set(to + 1, ring::SAMPLED, Ordering::Relaxed);
        }
        if count < limits.tokens_per_row {
            out.set(to + count * ring::PLACE_WORDS + 1, 0, Ordering::Relaxed);
        }
    }
    out.set(at + ring::ROWS, rows, Ordering::Relaxed);
    out.set(at + ring::LAUNCH_HI, (launch >> 32) as u32, Ordering::Relaxed);
    out.set(at + ring::LAUNCH_LO, launch as u32, Ordering::Release);
}

/// Words of a model checker, which tries every order in which they could be seen. Only the words that the protocol
/// touches exist.
struct Modelled(Arc<std::collections::BTreeMap<u32, loom::sync::atomic::AtomicU32>>);

impl Clone for Modelled {
    fn clone(&self) -> Self {
        Modelled(self.0.clone())
    }
}

impl Modelled {
    fn new(words: impl IntoIterator<Item = u32>) -> Modelled {
        let word = |index| (index, loom::sync::atomic::AtomicU32::new(0));
        Modelled(Arc::new(words.into_iter().map(word).collect()))
    }
}

impl Words for Modelled {
    fn get(&self, index: u32, order: Ordering) -> u32 {
        // Words that are never written read as zero.
        self.0.get(&index).map_or(0, |word| word.load(order))
    }

    fn set(&self, index: u32, value: u32, order: Ordering) {
        if let Some(word) = self.0.get(&index) {
            word.store(value, order);
        }
    }

    fn fence(&self, order: Ordering) {
        loom::sync::atomic::fence(order);
    }
}

#[test]
fn no_order_of_events_tears_or_loses_a_generation() {
    let limits = limits(1);
    let layout = limits.mail_layout();
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let bank = || {
            let head = [header::LAUNCH_LO, header::LAUNCH_HI, header::ROWS];
            Modelled::new(head.into_iter().chain(layout.rows..layout.rows + 3))
        };
        let banks = [bank(), bank()];
        let entries = (1..=3u32).flat_map(|n| {
            let at = n % ring::ENTRIES * limits.ring_entry_words();
            let head = [at + ring::LAUNCH_LO, at + ring::LAUNCH_HI, at + ring::ROWS];
            let row = at + ring::HEADER_WORDS;
            head.into_iter().chain(row..row + 2)
        });
        let shared = Modelled::new(entries);
        let device = {
            let (banks, shared) = (banks.clone(), shared.clone());
            loom::thread::spawn(move || {
                for launch in 1..=3 {
                    device_step(&limits, &banks, &shared, launch, loom::thread::yield_now);
                }
            })
        };
        let mut mail = MailBank::over(limits, banks);
        let mut reader = RingReader::over(limits, shared);
        let mut next = 1;
        while reader.confirmed() < 3 {
            if next <= 3 {
                match send(&mut mail, next, reader.confirmed(), 1) {
                    Ok(()) => next += 1,
                    Err(problem) => assert!(matches!(problem, Error::MailBusy { .. })),
                }
            }
            match reader.poll().expect("never overrun: two launches are in flight at most") {
                Some(entry) => verify(&limits, entry, 1),
                None => loom::thread::yield_now(),
            }
        }
        device.join().expect("the device's half does not panic");
    });
}

#[test]
fn a_bank_is_refused_until_its_last_launch_is_confirmed() {
    let limits = limits(1);
    let bank = || Plain::new(limits.mail_layout().words);
    let mut mail = MailBank::over(limits, [bank(), bank()]);
    for (launch, confirmed, allowed) in
        [(1, 0, true), (2, 0, true), (3, 0, false), (3, 1, true), (4, 1, false), (9, 7, true)]
    {
        assert_eq!(mail.open(launch, confirmed).is_ok(), allowed, "{launch} after {confirmed}");
    }
}

#[test]
fn mail_that_does_not_fit_is_refused() {
    let limits = limits(2);
    let bank = || Plain::new(limits.mail_layout().words);
    let mut mail = MailBank::over(limits, [bank(), bank()]);
    let mut letter = mail.open(1, 0).expect("the first bank is free");
    assert!(letter.tokens(&[1, 2]).is_ok());
    let full = Error::MailFull { area: "tokens", limit: 2, asked: 3 };
    assert_eq!(letter.tokens(&[3]), Err(full));
    assert!(letter.rows(&[payload(1, 0); 3]).is_err());
    assert!(letter.seen(0, 0, true).is_err(), "no penalties, no room");
    assert!(letter.mask(2, &[0]).is_err());
    assert!(letter.mask(1, &[0, 0]).is_err());
    for seat in 0..2 {
        assert!(letter.join(seat, 0, 0, &[0; PARAM_WORDS as usize]).is_ok());
    }
    assert!(letter.join(2, 0, 0, &[0; PARAM_WORDS as usize]).is_err());
}

#[test]
fn a_ring_that_went_round_is_an_error() {
    let limits = limits(1);
    let ring_words = Plain::new(ring::ENTRIES * limits.ring_entry_words());
    let mut reader = RingReader::over(limits, ring_words);
    assert!(reader.poll().expect("nothing there yet").is_none());
    let at = limits.ring_entry_words();
    let late = 1 + u64::from(ring::ENTRIES);
    reader.ring.set(at + ring::LAUNCH_LO, late as u32, Ordering::Release);
    let overrun = Error::RingOverrun { expected: 1, found: late };
    assert_eq!(reader.poll().map(|_| ()), Err(overrun));
}

/// Words in ordinary memory.
struct Plain(Arc<Vec<AtomicU32>>);

impl Plain {
    fn new(words: u32) -> Plain {
        Plain(Arc::new((0..words).map(|_| AtomicU32::new(0)).collect()))
    }
}

impl Clone for Plain {
    fn clone(&self) -> Self {
        Plain(self.0.clone())
    }
}

impl Words for Plain {
    fn get(&self, index: u32, order: Ordering) -> u32 {
        self.0[index as usize].load(order)
    }

    fn set(&self, index: u32, value: u32, order: Ordering) {
        self.0[index as usize].store(value, order);
    }

    fn fence(&self, order: Ordering) {
        std::sync::atomic::fence(order);
    }
}

/// Sends and reads `count` launches.
fn exchange<W: Words>(mail: &mut MailBank<W>, reader: &mut RingReader<W>, count: u64, rows: u32) {
    let (mut next, limits) = (1, mail.limits);
    while reader.confirmed() < count {
        while next <= count && next <= reader.confirmed() + 2 {
            send(mail, next, reader.confirmed(), rows).expect("the bank is free");
            next += 1;
        }
        match reader.poll().expect("never overrun: two launches are in flight at most") {
            Some(entry) => verify(&limits, entry, rows),
            None => std::thread::yield_now(),
        }
    }
}

#[test]
fn twenty_thousand_launches_between_two_threads() {
    between_two_threads(limits(3), 20_000);
}

/// Places of an earlier launch are never returned, and a row's tokens come in order.
#[test]
fn rows_return_as_many_tokens_as_were_written() {
    between_two_threads(StepLimits { tokens_per_row: 5, ..limits(3) }, 2_000);
}

fn between_two_threads(limits: StepLimits, count: u64) {
    let bank = || Plain::new(limits.mail_layout().words);
    let banks = [bank(), bank()];
    let shared = Plain::new(ring::ENTRIES * limits.ring_entry_words());
    let device = {
        let (banks, shared) = (banks.clone(), shared.clone());
        std::thread::spawn(move || {
            for launch in 1..=count {
                device_step(&limits, &banks, &shared, launch, std::thread::yield_now);
            }
        })
    };
    let mut mail = MailBank::over(limits, banks);
    let mut reader = RingReader::over(limits, shared);
    exchange(&mut mail, &mut reader, count, 3);
    device.join().expect("the device's half does not panic");
}

#[test]
fn a_million_publications_through_a_gpu() {
    let Ok((device, _)) = Device::open(DeviceChoice::Cuda(0)) else {
        eprintln!("skipped: no GPU");
        return;
    };
    let (limits, count) = (limits(8), 1_000_000);
    let mut open = OpenArena::new();
    let state = StepState::lay_out(limits, |region, name, bytes| open.alloc(region, name, bytes))
        .expect("limits of a few rows");
    let arena = device.seal(open).expect("a few kilobytes");
    let layout = limits.mail_layout();
    let constants = [
        ("MAIL_ROWS", layout.rows),
        ("RING_ENTRIES", ring::ENTRIES),
        ("ENTRY_WORDS", limits.ring_entry_words()),
    ];
    let define = |(name, value): (&str, u32)| (name.to_owned(), value.to_string());
    let kernel = KernelKey {
        source: "mail_test".into(),
        entry: "mail_test".into(),
        defines: constants.map(define).to_vec(),
    };
    let args = vec![
        Arg::Address(state.mail[0]),
        Arg::Address(state.mail[1]),
        Arg::Address(state.ring),
        Arg::U32(count as u32),
    ];
    let launch = Launch {
        kernel,
        grid: [1, 1, 1],
        block: [32, 1, 1],
        cluster: [1, 1, 1],
        shared: 0,
        args,
        waits: false,
    };
    let cuda = device.driver.as_cuda().expect("opened as one");
    let steps = [Step::Work(vec![Lowered::Launch(launch)])];
    cuda.executor().prepare(&steps).expect("it compiles");
    let options = RecordOptions::default();
    let graph = crate::cuda::record::CudaGraph::new(cuda.executor(), &arena, &steps, options)
        .expect("it records");
    graph.replay().expect("it starts");
    let mut mail = MailBank::new(&arena, &state).expect("host-mapped");
    let mut reader = RingReader::new(&arena, &state).expect("host-mapped");
    exchange(&mut mail, &mut reader, count, limits.rows);
    device.sync().expect("it ends");
}
