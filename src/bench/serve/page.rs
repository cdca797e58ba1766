//! One page that compares the results of several servers.

use super::{plot, side_by_side};
use anyhow::Result;
use load::Report;

/// The table and the plots, in one file without anything from outside.
pub(super) fn page(reports: &[Report]) -> Result<String> {
    let mut body = String::from("<h1>Load test</h1>\n<ul>\n");
    for report in reports {
        let line =
            format!("{}: {} at {}: {}", report.label, report.model, report.base_url, report.load);
        body += &format!("<li>{}</li>\n", escaped(&line));
    }
    body += &format!("</ul>\n<pre>{}</pre>\n", escaped(&side_by_side(reports)));
    for (_, svg) in plot::all(reports)? {
        body += &svg;
        body += "\n";
    }
    let style = "body { font: 15px sans-serif; margin: 2em auto; max-width: 60em } pre { overflow-x: auto } \
        svg { max-width: 100%; height: auto }";
    Ok(format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>Load test</title>\n\
         <style>{style}</style>\n{body}</html>\n"
    ))
}

/// Labels and addresses are a user's words.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_every_server_and_no_foreign_markup() {
        let reports = [plot::tests::sample("a <b>", 1.0), plot::tests::sample("other", 2.0)];
        let page = page(&reports).unwrap();
        assert!(page.contains("a &lt;b&gt;") && page.contains("other"), "{page}");
        assert!(page.contains("(2.00×)") && page.matches("<svg").count() == 4);
        assert!(!page.contains("<b>"));
    }
}
