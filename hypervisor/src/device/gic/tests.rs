mod forwarded;
mod lists;
mod machine;
mod model;
mod registers;
mod states;
