mod lists;
mod machine;
mod model;
mod registers;
