#!/usr/bin/env python3
"""Make a text corpus of 210 MB, half documentation and half code, from packages of public registries.

    apt-get update                           # Debian 12; pip and npm must be installed as well
    python3 corpus.py                        # writes runs/corpus/corpus.txt
    python3 corpus.py --out DIR --cache DIR  # elsewhere; the packages stay in the cache
    python3 corpus.py --pin                  # newest versions of the packages named below, new corpus.json

`corpus.json` beside this file lists the packages with their versions and SHA-256, and the size and SHA-256 of
the corpus. Each package is downloaded by its registry's own client (pip, npm, apt-get), which neither installs it
nor runs anything of it. Two runs give the same bytes; a result with another hash is an error, and is not kept.
A run takes 9 minutes on one core and 1 GB of memory, and the downloads, of 0.7 GB, 2 minutes more.

From each package come the files with an ending that is listed below, pages of HTML as text. Left out are:

- what is not UTF-8, has a line of more than 2000 bytes, has fewer than 200 bytes or more than 1 MB, is to over 40 %
  digits or to over 20 % not ASCII;
- vendored copies, translations, test data, licences, and changelogs of more than 200 KB;
- copies: a file with the same bytes as one before it, or whose runs of eight words were for the most part in files
  before it, as those of another form of the same page are.

The files stand in the order of a hash of their package and path, so that every part of the corpus is the same
mixture, with a blank line after each. If they are more than the corpus may have, the last in this order are left
out.

The exit status is 2 after an error, with one line that says what was wrong.
"""

import argparse
import gzip
import hashlib
import html.parser
import io
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import zipfile
import zlib
from collections import Counter
from pathlib import Path, PurePosixPath

MANIFEST = Path(__file__).with_name("corpus.json")

CORPUS_BYTES = 210_000_000

# registry, name, at most so many megabytes of it, and, if not all of it is wanted, a pattern for the beginning of
# the paths. A package of documentation stands before code that quotes it. One package of a project is enough:
# another version, or another form of the same text, would put training text into the validation text.
PACKAGES = """
debian linux-doc-6.1 12
debian python3.11-doc 7
debian postgresql-doc-15 6
debian perl-doc 6
debian sqlite3-doc 6
debian llvm-15-doc 5
debian clang-15-doc 2
debian cmake-doc 3
debian git-doc 3
debian debian-reference-en 2
debian debian-handbook 1 .*/en-US/
debian debian-policy 2
debian developers-reference 1
debian anarchism 9
debian vim-runtime 6 .*/doc/
debian qtbase5-doc-html 6
debian qtdeclarative5-doc-html 2
debian python-django-doc 5
debian python-sqlalchemy-doc 5
debian python-scipy-doc 4
debian python-pandas-doc 3
debian erlang-doc 4
debian nova-doc 2
debian neutron-doc 2
debian r-doc-html 2
debian libgtk-3-doc 3
debian libboost1.81-doc 5
debian rust-doc 5 .*/(book|nomicon|reference|rust-by-example|edition-guide|cargo|rustc|embedded-book|style-guide)/
debian nodejs-doc 4
debian octave-doc 2
debian maxima-doc 2
debian kicad-doc-en 1
debian gimp-help-en 2
debian libreoffice-help-en-us 3
debian exim4-doc-html 2
debian slurm-wlm-doc 2
debian linux-source-6.1 14 linux-source-6.1/(kernel|mm|fs|block|ipc|lib|security|crypto|net/(core|ipv4|ipv6)|include/linux|drivers/(base|char|md|nvme|tty))/
debian glibc-source 6
debian postgresql-server-dev-15 3
debian rust-src 16 .*/(library|compiler)/
debian librust-tokio-dev 3
debian librust-rustls-dev 1
pypi sympy 6
pypi django 3
pypi networkx 2
pypi twisted 4
pypi ansible-core 3
pypi transformers 4
pypi jax 3
pypi keras 3
pypi tensorflow-probability 3
pypi nltk 2
pypi sphinx 2
pypi mypy 3
pypi pylint 2
pypi celery 2
pypi dask 2
pypi xarray 2
pypi scapy 3
npm three 4 package/(src|examples/jsm)/
npm phaser 3 package/src/
npm rxjs 1 package/src/
npm webpack 2 package/lib/
npm eslint 2 package/lib/
npm ol 2
npm mathjs 1 package/lib/esm/
npm playcanvas 3 package/(src|build/playcanvas/src)/
npm @types/node 2
npm @babylonjs/core 3
"""

PAGES = {".html", ".htm", ".xhtml"}
PROSE = {".md", ".rst", ".txt", ".pod"} | PAGES
CODE = {".rs", ".py", ".c", ".h", ".js", ".mjs", ".ts", ".tsx"}

UNWANTED_FOLDERS = set(
    """vendor vendored _vendor third_party third-party thirdparty 3rdparty extern external node_modules
    locale locales translations i18n l10n po testdata test_data test-data testsuite-data fixtures snapshots
    __snapshots__ baselines _modules _sources _static""".split()
)
# indices, copies of the code, and pages that only refer to others
UNWANTED_NAMES = re.compile(
    r"(licen[cs]e|copying|copyright|genindex|py-modindex|search|.*-members|.*\.min)\b"
    r"|(allclasses|allpackages|index-all|type-search|member-search|package-use|package-tree|overview-tree)",
    re.IGNORECASE,
)
CHANGELOG = re.compile(r"change|history|news|release", re.IGNORECASE)

MEGABYTE = 1_000_000
LONGEST_LINE = 2000
SHORTEST_FILE = 200
LONGEST_FILE = MEGABYTE
LONGEST_PAGE = 8 * MEGABYTE  # as HTML
LONGEST_CHANGELOG = 200_000
# Copies are known by their runs of so many words; one run in SAMPLED is remembered.
RUN = 8
SAMPLED = 8
WORD = re.compile(rb"\w+")

# Tags that change no text; most tags of a page with coloured code are of this kind, and the parser is slow.
INLINE_TAG = re.compile(r"</?(span|code|em|strong|tt|b|i|var)\b[^<>]*>")

NOT_DIGITS = bytes(set(range(256)) - set(b"0123456789"))
ASCII = bytes(range(128))


class Fault(Exception):
    """What the user is told in one line."""


# ---------------------------------------------------------------------------------------------------- downloads


def call(command, folder):
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode != 0:
        raise Fault(f"`{' '.join(command)}` failed: {' '.join(result.stderr.split())[:300]}")
    return result.stdout


def debian_version(name):
    """The newest in the release itself: the archive of security updates forgets old versions."""
    rows = [line.split("|") for line in call(["apt-cache", "madison", name], ".").splitlines()]
    versions = [version.strip() for _, version, source in rows if " bookworm/main " in source]
    if not versions:
        raise Fault(f"Debian 12 has no package {name}, or apt-get update has not been run")
    return versions[0]


def client(registry, name, version):
    """The command that downloads one package into the current folder."""
    if registry == "debian":
        # Without the option apt-get warns where the folder is closed to its own user.
        sandbox = ["-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []
        return ["apt-get", "-q", "download", *sandbox, f"{name}={version}"]
    if registry == "pypi":
        wanted = f"{name}=={version}" if version else name
        # Only wheels without machine code: there is one of each version, on every machine.
        only = "--only-binary=:all: --platform any --implementation py --abi none --python-version 3.13"
        return [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *only.split(), wanted]
    if registry == "npm":
        return ["npm", "pack", "--loglevel=error", "--ignore-scripts", f"{name}@{version}" if version else name]
    raise Fault(f"there is no registry called {registry}")


def version_of(registry, name, archive):
    if registry == "pypi":
        return archive.name.split("-")[1]
    with tarfile.open(archive) as package:
        # The outer folder is mostly, not always, called `package`.
        name = next(name for name in package.getnames() if re.fullmatch(r"[^/]+/package\.json", name))
        return json.load(package.extractfile(name))["version"]


def download(registry, name, version, cache):
    """Path of the package in the cache; a failure is tried again twice."""
    folder = cache / registry
    folder.mkdir(parents=True, exist_ok=True)
    for attempt in range(3):
        with tempfile.TemporaryDirectory(dir=folder, prefix="part-") as part:
            try:
                call(client(registry, name, version), part)
                (archive,) = Path(part).iterdir()
                # A version's colon is an escape in some clients' file names.
                target = folder / archive.name
                os.replace(archive, target)
                return target
            except (Fault, ValueError) as fault:
                if attempt == 2:
                    raise fault if isinstance(fault, Fault) else Fault(f"{name}: not one file came")


def sha256_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(entry, cache):
    """The archive that the manifest's entry describes, from the cache if it is there."""
    path = cache / entry["registry"] / entry["file"]
    if not path.is_file():
        path = download(entry["registry"], entry["name"], entry["version"], cache)
    found = sha256_of(path)
    if found != entry["sha256"]:
        raise Fault(f"{path}: SHA-256 {found}, but {MANIFEST.name} has {entry['sha256']}")
    return path


def pin(registry, name, cache):
    version = debian_version(name) if registry == "debian" else None
    path = None
    if version:
        escaped = version.replace(":", "%3a")
        path = next((cache / registry).glob(f"{name}_{escaped}_*.deb"), None)
    path = path or download(registry, name, version, cache)
    version = version or version_of(registry, name, path)
    return {"registry": registry, "name": name, "version": version, "file": path.name, "sha256": sha256_of(path)}


# ----------------------------------------------------------------------------------------------------- archives


def members_of_tar(stream):
    with tarfile.open(fileobj=stream, mode="r|*") as archive:
        for member in archive:
            if member.isfile():
                yield member.name, member.size, lambda: archive.extractfile(member)


def members_of_deb(path):
    """The files of data.tar in a Debian package, which is an `ar` archive."""
    with open(path, "rb") as file:
        if file.read(8) != b"!<arch>\n":
            raise Fault(f"{path}: not a Debian package")
        while header := file.read(60):
            size = int(header[48:58])
            if header.startswith(b"data.tar"):
                yield from members_of_tar(io.BytesIO(file.read(size)))
                return
            file.seek(size + size % 2, os.SEEK_CUR)
    raise Fault(f"{path}: a Debian package without data")


def members_of_wheel(path):
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            yield info.filename, info.file_size, lambda: archive.open(info)


def members(path):
    """(path in the package, size, function that opens it) of every file; also of an archive inside."""
    if path.suffix == ".deb":
        found = members_of_deb(path)
    elif path.suffix == ".whl":
        found = members_of_wheel(path)
    else:
        found = members_of_tar(open(path, "rb"))
    for name, size, opener in found:
        if re.search(r"\.tar\.(xz|gz|bz2)$", name):
            yield from members_of_tar(opener())
        else:
            yield name.removeprefix("./"), size, opener


def ending_of(name):
    return PurePosixPath(name.removesuffix(".gz")).suffix.lower()


def is_wanted(name, size, pattern):
    path = PurePosixPath(name)
    ending = ending_of(name)
    if ending not in PROSE | CODE or size > (LONGEST_PAGE if ending in PAGES else LONGEST_FILE):
        return False
    if pattern and not re.match(pattern, name):
        return False
    if CHANGELOG.match(path.name) and size > LONGEST_CHANGELOG:
        return False
    return not UNWANTED_NAMES.match(path.name) and not UNWANTED_FOLDERS & {part.lower() for part in path.parts[:-1]}


# --------------------------------------------------------------------------------------------------------- text


class Page(html.parser.HTMLParser):
    """The text of a page: its main part if it has one, without what is on every page of a site."""

    SKIPPED = {"script", "style", "nav", "header", "footer", "head", "svg", "math", "button", "form", "iframe"}
    SKIPPED_CLASSES = set(
        """headerlink related sphinxsidebar navheader navfooter toc toctree-wrapper linenos footer spirit-nav
        breadcrumb sidebar source src anchor""".split()
    )
    VOID = {"br", "hr", "img", "input", "meta", "link", "col", "wbr", "area", "base", "source", "embed", "param"}
    LOOSE = {"p", "pre", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "dl", "table", "blockquote", "section"}
    TIGHT = {"li", "tr", "dt", "dd", "div", "br", "hr", "article", "main", "body", "caption", "figure", "details"}

    def __init__(self):
        super().__init__()
        self.blocks, self.block = [], []
        self.gap, self.mark = "\n", ""
        self.preformatted = 0
        self.skipped = None  # (tag, how deep it is nested in itself)
        self.main = self.main_blocks = None

    def flush(self):
        text, self.block = "".join(self.block), []
        if self.preformatted:
            text = "\n".join(line.rstrip() for line in text.split("\n")).strip("\n")
        else:
            text = " ".join(text.split())
            if text:
                text = textwrap.fill(self.mark + text, 100, break_long_words=False, break_on_hyphens=False)
                self.mark = ""
        if text:
            self.blocks += [self.gap, text]
            self.gap = "\n"

    def handle_starttag(self, tag, attributes):
        if self.skipped:
            if tag == self.skipped[0]:
                self.skipped = (tag, self.skipped[1] + 1)
            return
        attributes = dict(attributes)
        if tag not in self.VOID and (
            tag in self.SKIPPED or self.SKIPPED_CLASSES & set((attributes.get("class") or "").split())
        ):
            self.skipped = (tag, 1)
            return
        if tag in self.LOOSE or tag in self.TIGHT:
            self.flush()
            # A paragraph that begins a list's item stands beside its mark.
            if tag in self.LOOSE and not self.mark:
                self.gap = "\n\n"
        if self.main:
            if tag == self.main[0]:
                self.main = (tag, self.main[1] + 1)
        elif self.main_blocks is None and (tag == "main" or attributes.get("role") == "main"):
            self.main = (tag, 1)
            self.main_start = len(self.blocks)
        if tag == "pre":
            self.preformatted += 1
            self.mark = ""
        elif tag == "li":
            self.mark = "- "
        elif re.fullmatch("h[1-6]", tag):
            self.mark = "#" * int(tag[1]) + " "
        elif tag in ("td", "th") and "".join(self.block).strip():
            self.block.append(" | ")

    def handle_endtag(self, tag):
        if self.skipped:
            if tag == self.skipped[0]:
                depth = self.skipped[1] - 1
                self.skipped = (tag, depth) if depth else None
            return
        if tag in self.LOOSE or tag in self.TIGHT:
            self.flush()
            self.mark = ""
            if tag in self.LOOSE:
                self.gap = "\n\n"
        if tag == "pre" and self.preformatted:
            self.preformatted -= 1
        if self.main and tag == self.main[0]:
            depth = self.main[1] - 1
            self.main = (tag, depth) if depth else None
            if not depth:
                self.main_blocks = self.blocks[self.main_start :]

    def handle_data(self, data):
        if not self.skipped:
            self.block.append(data)

    def text(self):
        self.close()
        self.flush()
        return "".join(self.main_blocks or self.blocks).strip("\n")


def text_of(raw, ending):
    """The bytes of a file as they stand in the corpus, or None if it is not to be in it."""
    try:
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
    if ending in PAGES:
        page = Page()
        page.feed(INLINE_TAG.sub("", text))
        text = page.text().replace("\N{NO-BREAK SPACE}", " ").replace("\N{PILCROW SIGN}", "")
    data = text.strip("\n").encode()
    size = len(data)
    if not SHORTEST_FILE <= size <= LONGEST_FILE or b"\0" in data:
        return None
    if max(map(len, data.split(b"\n"))) > LONGEST_LINE:
        return None
    digits = len(data.translate(None, NOT_DIGITS))
    foreign = len(data.translate(None, ASCII))
    return None if digits > 0.4 * size or foreign > 0.2 * size else data


class Seen:
    """The files and runs of words that are in the corpus already."""

    def __init__(self):
        self.files, self.runs = set(), set()

    def add(self, data):
        """False if `data` is a copy; otherwise it counts as seen from now on."""
        whole = hashlib.sha256(data).digest()
        if whole in self.files:
            return False
        words = WORD.findall(data)
        sampled = set()
        for start in range(len(words) - RUN + 1):
            run = b" ".join(words[start : start + RUN])
            # Which runs are remembered depends on the run alone, so that a copy's are the same ones.
            if zlib.crc32(run) % SAMPLED == 0:
                sampled.add(hashlib.blake2b(run, digest_size=8).digest())
        if 2 * len(sampled & self.runs) > len(sampled):
            return False
        self.files.add(whole)
        self.runs |= sampled
        return True


def files_of(package, archive, seen):
    """(order, ending, text) of the files that the corpus takes from one package."""
    registry, name, megabytes, pattern = package
    found = []
    for path, size, opener in members(archive):
        if is_wanted(path, size, pattern):
            raw = opener().read()
            if path.endswith(".gz"):
                raw = gzip.decompress(raw)
            order = hashlib.sha256(f"{registry} {name} {path}".encode()).digest()
            found.append((order, ending_of(path), raw))
    found.sort(key=lambda file: file[0])
    room = megabytes * MEGABYTE
    for order, ending, raw in found:
        text = text_of(raw, ending)
        if text is not None and len(text) <= room and seen.add(text):
            room -= len(text)
            yield order, ending, text


# ------------------------------------------------------------------------------------------------------- corpus


def packages():
    """(registry, name, megabytes, pattern) of the list above."""
    for line in PACKAGES.split("\n"):
        if line:
            registry, name, megabytes, *pattern = line.split(" ", 3)
            yield registry, name, int(megabytes), pattern[0] if pattern else None


def assemble(entries, cache):
    """The files of the corpus in their order, as (order, ending, text, entry)."""
    table = {package[:2]: package for package in packages()}
    seen = Seen()
    files = []
    for entry in entries:
        package = table.get((entry["registry"], entry["name"]))
        if package is None:
            raise Fault(f"{MANIFEST.name} has {entry['name']}, which the list in corpus.py has not: run --pin")
        archive = fetch(entry, cache)
        try:
            taken = [(*file, entry) for file in files_of(package, archive, seen)]
        except (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, ValueError) as error:
            raise Fault(f"{archive}: {error}") from error
        size = sum(len(file[2]) for file in taken)
        print(f"{entry['registry']:7}{entry['name']:28}{len(taken):6} files {size / MEGABYTE:7.2f} MB", flush=True)
        files += taken
    files.sort(key=lambda file: file[0])
    total = 0
    for count, file in enumerate(files):
        total += len(file[2]) + 2
        if total > CORPUS_BYTES:
            return files[:count]
    return files


def report(files):
    counts, sizes = Counter(), Counter()
    for _, ending, text, _ in files:
        counts[ending] += 1
        sizes[ending] += len(text)
    total = sizes.total()
    print()
    for ending, size in sizes.most_common():
        print(f"{ending:7}{counts[ending]:7} files {size / MEGABYTE:7.2f} MB {100 * size / total:5.1f} %")
    prose = sum(sizes[ending] for ending in PROSE)
    print(f"documentation {100 * prose / total:.1f} %, code {100 - 100 * prose / total:.1f} %")


def write_atomically(path, chunks):
    """Writes beside the target first, so that a stop leaves no half of a file."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_manifest():
    try:
        manifest = json.loads(MANIFEST.read_text())
        for entry in manifest["packages"]:
            if Path(entry["file"]).name != entry["file"] or not re.fullmatch("[0-9a-f]{64}", entry["sha256"]):
                raise ValueError(f"{entry['name']} has a bad file name or SHA-256")
            for key in ("registry", "name", "version"):
                if not isinstance(entry[key], str):
                    raise ValueError(f"{key} is not text")
        return manifest["packages"], manifest["corpus"]["bytes"], manifest["corpus"]["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise Fault(f"{MANIFEST}: not a manifest of this program ({error})") from error


def manifest_text(entries, files, size, digest):
    kept = Counter()
    for *_, text, entry in files:
        kept[entry["registry"], entry["name"]] += len(text)
    rows = [json.dumps({**entry, "bytes": kept[entry["registry"], entry["name"]]}) for entry in entries]
    corpus = json.dumps({"bytes": size, "files": len(files), "sha256": digest, "python": sys.version.split()[0]})
    listed = ",\n    ".join(rows)
    return f'{{\n  "corpus": {corpus},\n  "packages": [\n    {listed}\n  ]\n}}\n'


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/corpus"), metavar="DIR", help="for corpus.txt")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="for the packages; OUT/cache if not given")
    parser.add_argument("--pin", action="store_true", help="take the newest versions and write corpus.json anew")
    options = parser.parse_args()
    cache = options.cache or options.out / "cache"
    options.out.mkdir(parents=True, exist_ok=True)

    if options.pin:
        entries = [pin(registry, name, cache) for registry, name, *_ in packages()]
    else:
        entries, expected_size, expected = read_manifest()
    files = assemble(entries, cache)

    size = sum(len(file[2]) + 2 for file in files)
    digest = hashlib.sha256()
    for file in files:
        digest.update(file[2] + b"\n\n")
    digest = digest.hexdigest()
    if not options.pin and (size, digest) != (expected_size, expected):
        raise Fault(
            f"the corpus has {size} bytes and SHA-256 {digest}, but {MANIFEST.name} has {expected_size} and {expected}:"
            " another version of Python may read HTML in another way"
        )
    target = options.out / "corpus.txt"
    write_atomically(target, (file[2] + b"\n\n" for file in files))
    if options.pin:
        write_atomically(MANIFEST, [manifest_text(entries, files, size, digest).encode()])
    report(files)
    print(f"{target}: {size} bytes, {len(files)} files, SHA-256 {digest}")


if __name__ == "__main__":
    try:
        main()
    except (Fault, OSError) as error:
        print(f"corpus.py: {error}", file=sys.stderr)
        sys.exit(2)
