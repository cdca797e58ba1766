//! Says what the machine has and what its hardware gives; with a file name, writes the figures as JSON.

fn main() {
    print!("{}", device::doctor::report());
    let opened = device::Device::open(device::DeviceChoice::Auto);
    let table = opened.and_then(|(device, _)| {
        device::bench::run(&device, &mut |what| eprintln!("measuring {what}"))
    });
    match table {
        Ok(table) => {
            print!("{table}");
            if let Some(file) = std::env::args().nth(1) {
                let json = serde_json::to_string_pretty(&table).expect("plain data");
                std::fs::write(&file, json)
                    .unwrap_or_else(|problem| eprintln!("{file}: {problem}"));
            }
        }
        Err(problem) => {
            eprintln!("error: {problem}");
            std::process::exit(1);
        }
    }
}
