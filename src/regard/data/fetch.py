"""Public data sets: where they are, how large, and a digest that says whether what came is what was meant.

An address can serve anything: another version, an error page with status 200, half a file. A SHA-256 cannot
be met by accident, so a file gets its name only after its size and digest have been checked. Addresses name a
commit, not a branch, and therefore never change what they mean.

Regard contains none of this data. Where there is no network, the error lists the files: fetch them elsewhere,
put them into a folder and give it with --data DIR.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import secrets
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

import regard
from regard.errors import UserError, suggest

TIMEOUT = 30.0  # seconds without a byte before a server counts as gone
BLOCK = 1 << 16


@dataclass(frozen=True)
class Remote:
    """One file: its name here, its address, its size in bytes and its digest."""

    name: str
    url: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Dataset:
    """Files that belong together."""

    name: str
    summary: str
    licence: str
    files: tuple[Remote, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def _files(address: str, table: str) -> tuple[Remote, ...]:
    """A table of names, sizes and digests, all under one address."""
    rows = (line.split() for line in table.strip().splitlines())
    return tuple(Remote(name, f"{address}/{name}", int(size), digest) for name, size, digest in rows)


_GITHUB = "https://raw.githubusercontent.com"
_MULTI30K = f"{_GITHUB}/multi30k/dataset/a3d2e0d26b56f3846f66a952536ffed4e401d05a/data/task1"
_MULTI30K_LICENCE = "none stated; the captions derive from Flickr30k: research and education (Elliott et al. 2016)"

# name, bytes, SHA-256
_RAW = """
test_2016_flickr.cs.gz            22572 200a4a74cc9560f051924abb9803be008d1908d77f747e9141aeb86dfd2797f1
test_2016_flickr.de.gz            22890 9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8
test_2016_flickr.en.gz            21077 611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9
test_2016_flickr.fr.gz            22310 6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90
test_2017_flickr.de.gz            21471 a2c89666db00c495cd8513b9d708d5a3acc205d7de312ef2bf5fb7ebc1540aee
test_2017_flickr.en.gz            19138 76a444ee25172e72695cddb13ae4a3bda59430617be88e0bb46b60504f054074
test_2017_flickr.fr.gz            20434 3ba671ceb2299f3304ffafefea7a833d08632fbaf0ba18546f8a2ec2391af496
test_2017_mscoco.de.gz            10230 799e4854c25d601cb6cb6be29eabe5667734c61ace2f495e03e429031a0bc338
test_2017_mscoco.en.gz             8844 aab300bfb4427697987e02cd0aacd44bfe8aa50456231b6474c08038bbed2b58
test_2017_mscoco.fr.gz             9751 754f3072ba9f124569ba5258b32730fc1d214bbf8e0c6dfb2b74401676220db0
train.cs.gz                      593827 a65adb8b32e3bc664f21ecba7a6e7f6950fd1f405e135f7c312faabdb6255077
train.de.gz                      637044 726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6
train.en.gz                      568929 d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f
train.fr.gz                      604242 622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c
val.cs.gz                         22096 b63226e05c4bd5dd6a42897d74b86a1b9d2c31498252c572b1ea7f7996927fcc
val.de.gz                         24681 f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a
val.en.gz                         21650 14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28
val.fr.gz                         23001 ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9
"""
_TOKENISED = """
test_2016_flickr.lc.norm.tok.cs   63566 748c8816de928732365176e5c5d2f9bbabcec9b8d4448fba2d230feb057898a7
test_2016_flickr.lc.norm.tok.de   71917 c6a33d39d48f9f510de147651316cd9d918e09ad0219df734a2f16b6baccacc4
test_2016_flickr.lc.norm.tok.en   63307 5b7f32627cf99eced828311b955dae9800bb52bc8b91cf8b6526829e605b29d2
test_2016_flickr.lc.norm.tok.fr   76394 1463bd5960f9bfe098ec3cd752d3df0c49c84dc646fb518964a29232658cd836
test_2017_flickr.lc.norm.tok.de   65228 02067e4a9402786a4fcb8c1b6f4307e4a5073ced64800abead5273b54f5f31f6
test_2017_flickr.lc.norm.tok.en   56123 c9d1dfd7a26add989382e534af235af9f0f658b2a30e7eb0efdaf142496ee54f
test_2017_flickr.lc.norm.tok.fr   69537 c0583117a47b31e8a6c6a97cfe8de153e462074668f4e994764fcc80b21d33b4
test_2017_mscoco.lc.norm.tok.de   30464 e2825990b8a4e5289d2cdba801d57c187810bab9b4f5d87a30c35800a0d871b6
test_2017_mscoco.lc.norm.tok.en   25380 fe69ae004d71c42ead0301e70c57de5b1b6b5fb7f52210d42b22801e98e656f3
test_2017_mscoco.lc.norm.tok.fr   31725 0b6a4620f02b6b9acf7811fda23f90fed9c6baa0b96aa224db50a273078c84d1
train.lc.norm.tok.cs            1791955 7645fb91efa18f94c83d493f740a5d5a941e4b01efa6a124bf2d4af040e133e0
train.lc.norm.tok.de            2150008 cb5a23529b65ec2061f1dc446192a9c37382b63cc75f81a0be59d34894b3a505
train.lc.norm.tok.en            1837696 08925f8e0572bcd5a006702fc5fe20e2d77c6917d4eebd576fc20de6693c2119
train.lc.norm.tok.fr            2235588 8fa41bb718412bcb7c5dfa58603842810a01543eae86a51279f9886b901266e1
val.lc.norm.tok.cs                61492 b87ee4917f4a0f9ca6cca03e402026c9f4437dc1bd6a7dadfd2544ecfb6c5501
val.lc.norm.tok.de                77273 97232bd273eceb7207f689527386a97e4be2616b18ada47576bdaf96c8ae1f00
val.lc.norm.tok.en                64608 46573ce391ae227f1c72f873392436a20ef18e0a6d518098cfbd70b77c8572ec
val.lc.norm.tok.fr                78242 b303e301aa21fe7822a846b2b3fb2d5a1121ec807cd5b1d006fb7b2b5507168a
"""
_SHAKESPEARE = """
input.txt 1115394 86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
"""

_GPT2_BPE = """
encoder.json 1042301 196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783
vocab.bpe     456318 1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5
"""

_NSMC = """
ratings_test.txt   4893335 8ac9f64052f11dbf6ae0acb5e038f03d90a76f0eda7820cfb3a92d02edfcebda
ratings_train.txt 14628807 e03b7d14e9e41be8d464a28057cd25d7396c53e67aa7fd5f7e552c59b0ee2940
"""

_FASHION = """
t10k-images-idx3-ubyte.gz   4422102 346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073
t10k-labels-idx1-ubyte.gz      5148 67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5
train-images-idx3-ubyte.gz 26421880 3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84
train-labels-idx1-ubyte.gz    29515 a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845
"""

DATASETS = {
    dataset.name: dataset
    for dataset in (
        Dataset(
            "multi30k",
            "29,000 image captions in English, German, French, Czech; line n is the same in all",
            _MULTI30K_LICENCE,
            _files(f"{_MULTI30K}/raw", _RAW),
        ),
        Dataset(
            "multi30k-tok",
            "the same in lower case, normalised and tokenised, as published scores use it",
            _MULTI30K_LICENCE,
            _files(f"{_MULTI30K}/tok", _TOKENISED),
        ),
        Dataset(
            "shakespeare",
            "40,000 lines of Shakespeare in one file, for language models",
            "public-domain text; repository MIT",
            _files(
                f"{_GITHUB}/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare",
                _SHAKESPEARE,
            ),
        ),
        Dataset(
            "gpt2-bpe",
            "GPT-2's vocabulary: 50,257 byte-level pieces, for  text.kind = 'gpt2'",
            "modified MIT (OpenAI)",
            _files("https://openaipublic.blob.core.windows.net/gpt-2/models/124M", _GPT2_BPE),
        ),
        Dataset(
            "nsmc",
            "200,000 Korean film reviews, negative or positive, for classifiers",
            "CC0 1.0",
            _files(f"{_GITHUB}/e9t/nsmc/cc0670e872d4ac27bfe36c87456783004b39ef6c", _NSMC),
        ),
        Dataset(
            "fashion-mnist",
            "70,000 grey pictures of clothes, shoes and bags, 28 x 28, in ten classes",
            "MIT (Zalando SE 2017)",
            _files(
                f"{_GITHUB}/zalandoresearch/fashion-mnist/b2617bb6d3ffa2e429640350f613e3291e10b141/data/fashion",
                _FASHION,
            ),
        ),
    )
}


def named(name: str) -> Dataset:
    """The data set of that name."""
    if name not in DATASETS:
        raise UserError(f"{name!r} is no data set that Regard knows; {suggest(name, DATASETS)}")
    return DATASETS[name]


def fetch(dataset: Dataset, folder: str | Path, timeout: float = TIMEOUT) -> list[Path]:
    """Download what is not in `folder` yet and return all paths; a file that is there whole is kept."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; name a folder with -o")
    missing = [file for file in dataset.files if not _is_there(folder / file.name, file)]
    total = sum(file.size for file in missing)
    live = bool(missing) and sys.stderr.isatty()
    with tqdm(total=total, desc=dataset.name, unit="B", unit_scale=True, disable=not live, leave=False) as bar:
        for at, file in enumerate(missing):
            try:
                _download(file, folder / file.name, timeout, bar)
            except (ValueError, OSError, http.client.HTTPException) as error:  # ValueError: ours, or a bad address
                raise UserError(_by_hand(dataset, missing[at:], folder, file, _reason(error, timeout))) from None
    return [folder / file.name for file in dataset.files]


def _is_there(path: Path, file: Remote) -> bool:
    """Whether the file is there already; another one of its name is not overwritten."""
    if not path.exists():
        return False
    if path.is_file() and path.stat().st_size == file.size:
        with path.open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256:
                return True
    raise UserError(f"{path}: is there, but with other content; delete it or name another folder with -o")


def _download(file: Remote, path: Path, timeout: float, bar: tqdm) -> None:
    """Fetch one file; it gets its name last."""
    request = urllib.request.Request(file.url, headers={"User-Agent": f"regard/{regard.__version__}"})
    digest, size = hashlib.sha256(), 0
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer, _create(temporary) as out:
            while size <= file.size and (block := answer.read(BLOCK)):  # a server that never ends is cut short
                size += len(block)
                digest.update(block)
                out.write(block)
                bar.update(len(block))
            out.flush()
            os.fsync(out.fileno())
        if size != file.size:
            what = "more" if size > file.size else f"{size:,}"
            raise UserError(f"{what} bytes came instead of {file.size:,}")
        if digest.hexdigest() != file.sha256:
            raise UserError(f"the content is not the one expected: its SHA-256 is {digest.hexdigest()}")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _create(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)  # only now: a server that does not answer leaves no folder
    return path.open("xb")


def _reason(error: Exception, timeout: float) -> str:
    """What went wrong, in words."""
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {error.reason}"
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return f"no answer within {timeout:g} s"
    if isinstance(cause, OSError):
        return cause.strerror or str(cause) or type(cause).__name__
    return str(cause) or type(cause).__name__


def _by_hand(dataset: Dataset, missing: Sequence[Remote], folder: Path, failed: Remote, reason: str) -> str:
    width = max(len(file.name) for file in missing)
    listed = [f"  {file.name:<{width}}  {file.size:>9,} bytes  sha256 {file.sha256}" for file in missing]
    lines = [
        f"{dataset.name}: {failed.url} cannot be downloaded: {reason}",
        f"Try again later: complete files are kept. Or get the files below another way, put them into {folder} or any",
        "folder, and name that where a command takes --data DIR. Their addresses differ from this one in the name:",
    ]
    return "\n".join(lines + listed)
