//! Panicking forms of functions that return a `Result`.

/// Defines a function that calls another with the same arguments and panics with the text of its error.
///
/// ```ignore
/// twin! {
///     /// The output.
///     pub fn forward(&self, x: Tensor<3>) -> Tensor<3> = Self::try_forward;
/// }
/// ```
///
/// It has the given documentation and a section on panics. Its result must be used.
macro_rules! twin {
    ($(#[$docs:meta])* pub fn $name:ident
        (&mut self $(, $arg:ident: $ty:ty)*) $(-> $out:ty)? = $try:path;) => {
        twin! { @ [$(#[$docs])*] [$name] [&mut self, $($arg: $ty),*] [self $(, $arg)*] [$($out)?] $try }
    };
    ($(#[$docs:meta])* pub fn $name:ident
        (&self $(, $arg:ident: $ty:ty)*) $(-> $out:ty)? = $try:path;) => {
        twin! { @ [$(#[$docs])*] [$name] [&self, $($arg: $ty),*] [self $(, $arg)*] [$($out)?] $try }
    };
    ($(#[$docs:meta])* pub fn $name:ident
        (self $(, $arg:ident: $ty:ty)*) $(-> $out:ty)? = $try:path;) => {
        twin! { @ [$(#[$docs])*] [$name] [self, $($arg: $ty),*] [self $(, $arg)*] [$($out)?] $try }
    };
    ($(#[$docs:meta])* pub fn $name:ident $(<const $n:ident: usize>)?
        ($($arg:ident: $ty:ty),*) $(-> $out:ty)? = $try:path;) => {
        twin! { @ [$(#[$docs])*] [$name $(<const $n: usize>)?] [$($arg: $ty),*] [$($arg),*] [$($out)?] $try }
    };
    (@ [$($docs:tt)*] [$($name:tt)*] [$($params:tt)*] [$($args:tt)*] [] $try:path) => {
        $($docs)*
        #[doc = ""]
        #[doc = "# Panics"]
        #[doc = ""]
        #[doc = concat!("If [`", stringify!($try), "`] returns an error, with that error's text.")]
        pub fn $($name)*($($params)*) {
            $crate::validate::expect($try($($args)*));
        }
    };
    (@ [$($docs:tt)*] [$($name:tt)*] [$($params:tt)*] [$($args:tt)*] [$out:ty] $try:path) => {
        $($docs)*
        #[doc = ""]
        #[doc = "# Panics"]
        #[doc = ""]
        #[doc = concat!("If [`", stringify!($try), "`] returns an error, with that error's text.")]
        #[must_use]
        pub fn $($name)*($($params)*) -> $out {
            $crate::validate::expect($try($($args)*))
        }
    };
}
