"""Makes the wheel from what cargo built: the extension module, the program, completions and manual pages.

A build backend of its own, because the wheel has a program and a module that share every crate: cargo builds both
in one run, and a wheel for tests is made of what `cargo test` has built already. Used by pip (`pip install .`) and by
`cargo xtask wheel`:

    wheel_of_cargo.py BUILD TAG FOLDER    BUILD has the program `dacapo` and the module `lib_dacapo.so`
"""

import base64
import hashlib
import io
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
#: The same bytes give the same archive.
TIME = (1980, 1, 1, 0, 0, 0)
COMPLETIONS = {
    "bash": "share/bash-completion/completions/dacapo",
    "zsh": "share/zsh/site-functions/_dacapo",
    "fish": "share/fish/vendor_completions.d/dacapo.fish",
}


def version():
    """The version of the workspace."""
    return re.search(r'^version = "(.+)"$', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)[1]


def metadata():
    """The package's metadata, with its guide."""
    text = (ROOT / "python/METADATA").read_text().replace("@VERSION@", version())
    return text + (ROOT / "docs/PYTHON.md").read_text()


class Wheel:
    """An archive with a record of its files."""

    def __init__(self, tag, folder):
        self.name = f"dacapo-{version()}"
        self.path = pathlib.Path(folder) / f"{self.name}-{tag}.whl"
        self.records = []
        self.bytes = io.BytesIO()
        self.archive = zipfile.ZipFile(self.bytes, "w", zipfile.ZIP_DEFLATED, compresslevel=9)

    def add(self, name, data, mode=0o644):
        """Adds a file."""
        info = zipfile.ZipInfo(name, TIME)
        info.external_attr = (0o100000 | mode) << 16
        info.compress_type = zipfile.ZIP_DEFLATED
        self.archive.writestr(info, data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        self.records.append(f"{name},sha256={digest},{len(data)}")

    def close(self):
        """Adds the record and writes the archive in one go."""
        record = f"{self.name}.dist-info/RECORD"
        text = "\n".join([*self.records, f"{record},,"]) + "\n"
        info = zipfile.ZipInfo(record, TIME)
        info.external_attr = 0o100644 << 16
        self.archive.writestr(info, text)
        self.archive.close()
        partial = self.path.with_suffix(".partial")
        partial.write_bytes(self.bytes.getvalue())
        partial.replace(self.path)


def shared_files(program):
    """Completions and manual pages, as the program writes them."""
    for shell, name in COMPLETIONS.items():
        yield name, subprocess.run([program, "completions", shell], check=True, stdout=subprocess.PIPE).stdout
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([program, "man", folder], check=True)
        for page in sorted(pathlib.Path(folder).iterdir()):
            yield f"share/man/man1/{page.name}", page.read_bytes()


def pack(build, tag, folder):
    """Makes a wheel of a folder that cargo built; returns its path."""
    build = pathlib.Path(build).resolve()
    # A module that was built for a test lies with the dependencies.
    module = next(path for path in (build / "lib_dacapo.so", build / "deps/lib_dacapo.so") if path.exists())
    wheel = Wheel(tag, folder)
    for source in sorted((ROOT / "python/dacapo").iterdir()):
        if source.suffix in (".py", ".pyi", ".typed") or source.name == "py.typed":
            wheel.add(f"dacapo/{source.name}", source.read_bytes())
    wheel.add("dacapo/_dacapo.abi3.so", module.read_bytes(), 0o755)
    wheel.add(f"{wheel.name}.data/scripts/dacapo", (build / "dacapo").read_bytes(), 0o755)
    for name, data in shared_files(build / "dacapo"):
        wheel.add(f"{wheel.name}.data/data/{name}", data)
    info = f"{wheel.name}.dist-info"
    wheel.add(f"{info}/METADATA", metadata().encode())
    text = f"Wheel-Version: 1.0\nGenerator: dacapo\nRoot-Is-Purelib: false\nTag: {tag}\n"
    wheel.add(f"{info}/WHEEL", text.encode())
    wheel.add(f"{info}/licenses/LICENSE", (ROOT / "LICENSE").read_bytes())
    wheel.close()
    return wheel.path


# The interface of pip: https://peps.python.org/pep-0517/


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Builds with cargo, for this machine."""
    command = ["cargo", "build", "--release", "--locked", "--package", "dacapo", "--package", "python"]
    subprocess.run(command, cwd=ROOT, check=True)
    build = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    return pack(build, f"cp39-abi3-{platform}", wheel_directory).name


def build_sdist(sdist_directory, config_settings=None):
    """There is none: releases are wheels and an archive."""
    raise NotImplementedError("dacapo has no source distribution; build a wheel from a checkout")


if __name__ == "__main__":
    print(pack(*sys.argv[1:]))
