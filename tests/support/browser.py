"""A page in a real browser without a head, where there is one."""

import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium here")
CONTRASTS = """{
const light = text => {
  const [r, g, b] = text.match(/[0-9]+/g).slice(0, 3).map(c => {
    c /= 255; return c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
  });
  return .2126 * r + .7152 * g + .0722 * b;
};
const ground = e => {
  const c = getComputedStyle(e).backgroundColor;
  return c === "rgba(0, 0, 0, 0)" && e.parentElement ? ground(e.parentElement) : c;
};
let least = 99;
for (const theme of ["light", "dark"]) {
  document.documentElement.dataset.theme = theme;
  for (const e of document.querySelectorAll("button, p, dt, dd, th, td, h1, h2, label, output, span, select")) {
    if (!e.textContent.trim()) continue;
    const pair = [light(getComputedStyle(e).color), light(ground(e))].sort((a, b) => b - a);
    least = Math.min(least, (pair[0] + .05) / (pair[1] + .05));
  }
}
document.body.dataset.least = least;
document.body.dataset.wide = document.documentElement.scrollWidth > innerWidth;
}"""
"""Writes the least contrast of a page's texts, in light and dark, and whether it is wider than its window."""


def drawn(page: str, script: str, directory: Path, *flags: str) -> str:
    path = directory / "page.html"
    assert page.count("draw();\n</script>") == 1
    path.write_text(page.replace("draw();\n</script>", f"draw();\n{script}\n</script>"), encoding="utf-8")
    words = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={directory / 'home'}", *flags]
    done = subprocess.run(
        [str(BROWSER), *words, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout
