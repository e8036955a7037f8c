"""Takes the pictures of pages in docs/images with a headless Chromium: `python docs/make_images.py runs/demo`.

The run is one of `make demo`; the page of `mm-grpo check` is made here. Needs a program `chromium` or `google-chrome`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

FOLDER = Path(__file__).parent / "images"
DARK, LIGHT = ("--blink-settings=preferredColorScheme=0", "--blink-settings=preferredColorScheme=1")
# The page in a frame: filled in and moved as a reader would, which a screenshot of the page itself cannot do.
FRAME = """<!doctype html>
<style>body { margin: 0; overflow: hidden } iframe { border: 0; width: WIDTHpx; height: HEIGHTpx }</style>
<iframe src="PAGE"></iframe><script>onload = () => {
  const frame = document.querySelector("iframe"), view = frame.contentWindow, page = view.document;
  const find = (id) => page.getElementById(id);
  const fill = (id, text) => {
    find(id).value = text;
    for (const kind of ["input", "change"]) find(id).dispatchEvent(new view.Event(kind, { bubbles: true }));
  };
  const head = (text) => [...page.querySelectorAll("h2")].find((one) => one.textContent.trim() === text);
  const show = (what, above) => {  // the frame moves up and not the page in it, which is then not painted whole
    const top = Math.floor(what.getBoundingClientRect().top + view.scrollY - above);
    frame.style.height = `${top + HEIGHT}px`;
    frame.style.marginTop = `-${top}px`;
  };
  SCRIPT
}</script>"""
MEASURED = 'fill("f-step", "30"); fill("f-uid", "791");'
ROLLOUTS = f'{MEASURED} show(head("Rollouts"), 10);'
GROUP = f'{MEASURED} show(page.querySelector("#groups > *"), 10);'


def main(run: Path) -> None:
    """Write report.png, report-phone.png and check-page.png."""
    found = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
    if found is None:
        sys.exit("there is no chromium, google-chrome or chrome on this machine")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        page, check = work / "report.html", work / "check.html"
        shutil.copyfile(run / "report.html", page)
        command = ["-m", "mm_grpo.cli", "check", "refcoco_grounding", "--smoke", "--page", str(check)]
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)

        def shot(page: Path, width: int, height: int, script: str = "", colours: str = LIGHT) -> Image.Image:
            frame = (
                FRAME.replace("WIDTH", str(width)).replace("HEIGHT", str(height)).replace("PAGE", page.name)
            )
            (work / "frame.html").write_text(frame.replace("SCRIPT", script))
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
            options += ["--allow-file-access-from-files", "--force-device-scale-factor=1", colours]
            options += [f"--user-data-dir={work / 'profile'}", "--virtual-time-budget=3000"]
            options += [f"--window-size={max(width, 500)},{height}", f"--screenshot={work / 'shot.png'}"]
            subprocess.run([found, *options, (work / "frame.html").as_uri()], check=True, capture_output=True)
            with Image.open(work / "shot.png") as image:
                return image.convert("RGB").crop((0, 0, width, height))

        both = Image.new("RGB", (1160, 1815))
        both.paste(shot(page, 1160, 1035), (0, 0))
        both.paste(shot(page, 1160, 780, ROLLOUTS), (0, 1035))
        save(both, "report.png")
        phone = Image.new("RGB", (732, 760), "white")
        phone.paste(shot(page, 360, 760, colours=DARK), (0, 0))
        phone.paste(shot(page, 360, 760, GROUP, colours=DARK), (372, 0))
        save(phone, "report-phone.png")
        save(shot(check, 720, 890, 'show(head("train"), 10);'), "check-page.png")


def save(image: Image.Image, name: str) -> None:
    """With as few bytes as flat colours need."""
    image.quantize(128).save(FOLDER / name, optimize=True)
    print(f"{FOLDER / name}: {(FOLDER / name).stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
