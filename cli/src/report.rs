//! `dunlin report`: one page of results, next to published figures of other systems.
//!
//! The page is one file, without external scripts, fonts or pictures. [`data`] has the figures, [`sections`] makes
//! tables and plots ([`plot`]), [`sources`] has the published figures, and [`page`] the frame around them. The page
//! hides no input: it names invalid lines, missing experiments, and figures that combine several builds. The last table
//! has every figure.

mod data;
mod number;
mod page;
mod plot;
mod sections;
mod sources;
#[cfg(test)]
mod tests;

use crate::args::ReportArgs;
use crate::failure::Failure;
use crate::records::read;
use data::Data;

pub(crate) fn run(args: &ReportArgs) -> Result<(), Failure> {
    let files = args.results.iter().map(|path| read(path)).collect::<Result<Vec<_>, _>>()?;
    for bad in files.iter().flat_map(|file| &file.bad) {
        eprintln!("{bad}");
    }
    let data = Data::of(files);
    if data.records.is_empty() {
        let names: Vec<_> = args.results.iter().map(|path| path.display().to_string()).collect();
        return Err(Failure::bad_input(format!("{}: has no records", names.join(", "))));
    }
    let page = page::page(&data).into_string();
    std::fs::write(&args.output, page).map_err(|error| Failure::failed(format!("{}: {error}", args.output.display())))
}
