//! `dunlin report`: one page of results, each beside the figures of those who were first to show it.
//!
//! The page is one file: no script, no font, no picture from elsewhere. [`data`] is what there is, [`sections`] puts it
//! into tables and plots ([`plot`]), [`sources`] is what others have, [`page`] what is around all of it. Nothing that
//! was read is left out silently: lines that are no records, experiments that are missing, and figures that were put
//! together from several builds are told where a reader looks for them, and the last table has every figure.

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
