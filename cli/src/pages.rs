//! `dunlin pages`: manual pages and completions, from the same description of the command line as `--help`.
//!
//! ```text
//! dunlin.1, dunlin-run.1, dunlin-bench-all.1 ...   a manual page for each command
//! dunlin.bash, _dunlin, dunlin.fish                completions for bash, zsh and fish
//! ```

use std::fs::File;
use std::io;
use std::path::Path;

use clap::{Command, CommandFactory as _};
use clap_complete::Shell;

use crate::args::{Args, PagesArgs};
use crate::failure::Failure;

/// Writes all of them.
pub(crate) fn run(args: &PagesArgs) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::failed(format!("{}: {error}", args.folder.display()));
    std::fs::create_dir_all(&args.folder).map_err(failed)?;
    let mut command = Args::command();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut command, "dunlin", &args.folder).map_err(failed)?;
    }
    command.build();
    write_pages(&command, "dunlin", &args.folder).map_err(failed)
}

/// Writes the manual page of `command`, which users type as `name`, and those of its commands.
fn write_pages(command: &Command, name: &str, folder: &Path) -> io::Result<()> {
    for verb in command.get_subcommands().filter(|verb| !verb.is_hide_set() && verb.get_name() != "help") {
        write_pages(verb, &format!("{name} {}", verb.get_name()), folder)?;
    }
    let title = name.replace(' ', "-");
    let page = clap_mangen::Man::new(command.clone().disable_help_subcommand(true))
        .title(title.to_uppercase())
        .source(format!("Dunlin {}", env!("CARGO_PKG_VERSION")))
        .manual("Dunlin");
    page.render(&mut File::create(folder.join(format!("{title}.1")))?)
}

#[cfg(test)]
mod tests {
    use super::run;
    use crate::args::PagesArgs;

    #[test]
    fn each_command_has_a_page_and_each_shell_knows_the_commands() {
        let folder = tempfile::tempdir().expect("a directory");
        run(&PagesArgs { folder: folder.path().to_path_buf() }).expect("they are written");
        let read =
            |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap_or_else(|_| panic!("no {name}"));
        assert!(read("dunlin.1").contains(".SH SYNOPSIS"));
        for (page, words) in [
            ("dunlin-check.1", "dunlin check"),
            ("dunlin-payload.1", "dunlin payload"),
            ("dunlin-bench-tlb.1", "dunlin bench tlb"),
        ] {
            let page = read(page);
            assert!(page.contains(words) && page.contains(".SH OPTIONS"), "{page}");
        }
        for name in ["dunlin.bash", "_dunlin", "dunlin.fish"] {
            let text = read(name);
            assert!(text.contains("metrics") && text.contains("tlb"), "{name}");
        }
        assert!(!folder.path().join("dunlin-pages.1").exists() && !folder.path().join("dunlin-help.1").exists());
    }
}
