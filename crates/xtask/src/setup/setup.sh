#!/bin/sh
# What a build of a CubeCL runtime needs beyond Rust and a C compiler.
#
#   setup.sh llvm VERSION [python]  LLVM's libraries for the bundler of this version, a C++ compiler, and Python with venv
#   setup.sh vulkan                 a Vulkan loader, and a driver that runs on the CPU if there is none
#   setup.sh browser                a browser that runs without a window: prints its name
#
# `cubecl-llvm` links LLVM (the CUDA and the CPU runtime both contain it) and finds it in a prefix that the build script of
# `tracel-llvm-bundler` fills from a GitHub release. Where that cannot be reached, the distribution's LLVM is used: the
# prefix then holds an `llvm-config` of two lines that calls the distribution's.
set -eu

# The distribution's LLVM that replaces the bundled one; others were not tried. And what linking it takes on Debian and Ubuntu.
llvm=22
llvm_packages="llvm-22-dev libpolly-22-dev libzstd-dev libxml2-dev zlib1g-dev"

say() { echo "setup: $*" >&2; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }
has() { command -v "$1" >/dev/null; }
quiet() { "$@" </dev/null >/dev/null 2>&1; }

# The packages that are not installed.
missing() {
    for package; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q ' installed$' || echo "$package"
    done
}

# Installs packages, or says what to type.
install() {
    [ "$#" -gt 0 ] || return 0
    manual="Type this, or what your distribution has for it, and try again:
    sudo apt-get update && sudo apt-get install -y $*"
    case "$*" in
        *"$llvm"*) manual="$manual
A release without LLVM $llvm gets it from https://apt.llvm.org (llvm.sh $llvm). None of it is needed where github.com can be
reached: the build then downloads its LLVM." ;;
    esac
    has apt-get || fail "there is no apt-get here. $manual"
    apt="env DEBIAN_FRONTEND=noninteractive apt-get"
    if [ "$(id -u)" != 0 ]; then
        quiet sudo -n true || fail "this is not root, and sudo wants a password. $manual"
        apt="sudo -n DEBIAN_FRONTEND=noninteractive apt-get"
    fi
    say "installing $*"
    for update in "" update; do
        [ -z "$update" ] || say "trying again with fresh package lists"
        [ -z "$update" ] || $apt update -qq >&2 || break
        if $apt install -y -qq --no-install-recommends "$@" >&2; then return; fi
    done
    fail "$manual"
}

# Whether the release's archive can be had. Without curl and wget a connection has to suffice, by Debian's own Perl.
reachable() {
    say "is $1 within reach?"
    if has curl; then
        quiet curl -fsIL --max-time 15 "$1"
    elif has wget; then
        quiet wget -q --spider --tries=1 --timeout=15 "$1"
    else
        quiet perl -MIO::Socket::INET -e 'exit !IO::Socket::INET->new(PeerAddr => "github.com:443", Timeout => 15)'
    fi
}

provide_llvm() {
    # `dirs::data_local_dir`, as the bundler.
    os=linux data="$HOME/.local/share" arch=x64
    case "${XDG_DATA_HOME:-}" in /*) data="$XDG_DATA_HOME" ;; esac
    [ "$(uname -s)" != Darwin ] || { os=macos; data="$HOME/Library/Application Support"; }
    case "$(uname -m)" in aarch64 | arm64) arch=AArch64 ;; esac
    url="https://github.com/tracel-ai/tracel-llvm/releases/download/v$1/$os-$arch.tar.xz"
    prefix="$data/tracel/tracel-llvm-$1"
    config="$prefix/bin/llvm-config"
    # By this file the bundler recognises a complete prefix.
    marker="$prefix/.tracel-llvm-installed"
    # The status of a pipeline is that of its last command, so only the output tells.
    works() { "$config" --version 2>/dev/null | grep -q '^[0-9]'; }
    ours() { grep -qs "llvm-config-$llvm" "$config"; }

    packages=
    if [ -e "$marker" ] && works; then
        from=prefix
        # What linking takes may have been removed since; elsewhere than on Debian the packages' names say nothing.
        if ours && has apt-get; then packages="$(missing $llvm_packages)"; fi
    elif ! ours && { [ -e "$marker" ] || [ -e "$config" ]; }; then
        fail "$prefix holds an LLVM that does not work, perhaps half unpacked. Remove it and try again:
    rm -r '$prefix'"
    elif ! ours && reachable "$url"; then
        from=release
    else
        from=distribution packages="$(missing $llvm_packages)"
    fi
    # LLVM is written in C++, and so is a part of `cubecl-llvm`. The headers come with the library to link.
    quiet "${CXX:-c++}" -fsyntax-only -include string -x c++ /dev/null || packages="$packages g++"
    [ "${2:-}" != python ] || quiet python3 -c 'import venv, ensurepip' || packages="$packages python3-venv"
    install $packages

    case "$from" in
        prefix) say "LLVM is in $prefix; nothing to do" ;;
        release) say "the build itself will download LLVM $1 (once, to $prefix)" ;;
        distribution)
            mkdir -p "$prefix/bin"
            # The distribution's names some system libraries by their absolute path, from which the bundler makes flags like
            # `-llibz3`; as `-lz3` they pass through it unharmed.
            cat >"$config" <<END
#!/bin/sh
# Written by \`cargo xtask setup\`: the distribution's LLVM in place of the bundled one.
llvm-config-$llvm "\$@" | sed 's#/[^ ]*/lib\\([^/ ]*\\)\\.so#-l\\1#g'
END
            chmod 755 "$config"
            works || fail "$config does not run; is llvm-config-$llvm in PATH?"
            # Last, so that the next run completes what an interrupted one leaves.
            : >"$marker"
            say "$prefix now refers to the distribution's LLVM $llvm"
            ;;
    esac
}

provide_vulkan() {
    if { ldconfig -p || /sbin/ldconfig -p; } 2>/dev/null | grep -q 'libvulkan\.so\.1' &&
        find /etc/vulkan/icd.d /usr/share/vulkan/icd.d -name '*.json' 2>/dev/null | grep -q .; then
        say "there is a Vulkan driver; nothing to do"
    else
        # The loader, and Mesa's drivers: lavapipe among them, which needs no GPU.
        install $(missing libvulkan1 mesa-vulkan-drivers)
    fi
}

# One that takes Chromium's options.
browser() {
    for name in chromium chromium-browser google-chrome google-chrome-stable; do
        if quiet "$name" --version; then echo "$name" && return; fi
    done
    false
}

case "${1:-}" in
    llvm) shift && provide_llvm "$@" ;;
    vulkan) provide_vulkan ;;
    browser) browser || { install chromium && browser; } || fail "Chromium is installed and does not run" ;;
    *) fail "setup.sh llvm VERSION [python] | vulkan | browser" ;;
esac
