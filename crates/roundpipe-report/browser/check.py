#!/usr/bin/env python3
"""Loads the report and the live page in a real browser and checks them; not part of `cargo test`.

    apt-get install chromium
    python3 -m venv VENV && VENV/bin/pip install playwright
    VENV/bin/python crates/roundpipe-report/browser/check.py [--images FOLDER]

Run it from the repository's root. It makes a sample run with the example `sample_report`, opens
`report.html` and the live server in Debian's Chromium (CHROMIUM names another), light, dark and 360
pixels wide, and fails at the first console message, request to elsewhere, overflow, missing curve or
text that became markup. `--images` writes screenshots there.
"""
import argparse
import os
import pathlib
import subprocess
import tempfile
import time

from playwright.sync_api import sync_playwright

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--force-color-profile=srgb"]
VIEWS = {
    "light": dict(viewport={"width": 1240, "height": 900}, color_scheme="light"),
    "dark": dict(viewport={"width": 1240, "height": 900}, color_scheme="dark"),
    "phone": dict(viewport={"width": 360, "height": 740}, color_scheme="light", device_scale_factor=2, has_touch=True, is_mobile=True),
    "phone-dark": dict(viewport={"width": 360, "height": 740}, color_scheme="dark", device_scale_factor=2, has_touch=True, is_mobile=True),
}
checks = 0


def check(what, is_true):
    global checks
    checks += 1
    if not is_true:
        raise SystemExit(f"FAILED: {what}")


def example(*arguments):
    return ["cargo", "run", "--quiet", "-p", "roundpipe-report", "--example", "sample_report", "--", *map(str, arguments)]


def opened(browser, url, allowed, **view):
    """A page with a list of what it complained about and asked for."""
    page = browser.new_context(**view).new_page()
    page.complaints, page.requests = [], []
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("request", lambda request: page.requests.append(request.url))
    page.on("dialog", lambda dialog: page.complaints.append("dialog"))
    page.goto(url)
    page.wait_for_timeout(300)
    page.allowed = allowed
    return page


def check_sound(name, page):
    check(f"{name}: no console message: {page.complaints}", not page.complaints)
    strangers = [url for url in page.requests if not url.startswith(page.allowed)]
    check(f"{name}: no request to elsewhere: {strangers}", not strangers)
    wide, seen = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    check(f"{name}: {wide} pixels in {seen}", wide <= seen)
    cut = page.evaluate("""[...document.querySelectorAll('.tile, .head, .chip, h1, .readout')]
        .filter(e => e.offsetParent && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== 'inline').map(e => e.id || e.className)""")
    check(f"{name}: nothing sticks out: {cut}", not cut)
    bad = page.evaluate("document.querySelector('main').outerHTML.match(/(NaN|Infinity|undefined|null)[^a-z]/)")
    check(f"{name}: every number is one: {bad}", bad is None)


def check_page(name, page):
    check_sound(name, page)
    for card, least, tall in [("loss", 200, 40), ("lr", 20, 40), ("norm", 100, 40), ("speed", 100, 4)]:
        points = page.evaluate(f"(document.querySelector('#{card} path.curve').getAttribute('d').match(/[ML]/g) || []).length")
        box = page.evaluate(f"(b => [b.width, b.height])(document.querySelector('#{card} path.curve').getBBox())")
        check(f"{name}: the curve of {card} has {points} points in {box}", points >= least and box[0] > 100 and box[1] > tall)
    check(f"{name}: evaluations", page.locator("#loss circle.dot").count() >= 4)
    check(f"{name}: one best", page.locator("#loss circle.best").count() == 1)
    colours = page.evaluate("""(() => { const c = document.getElementById('lanes'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, seen = new Set();
        for (let i = 0; i < d.length; i += 4) if (d[i + 3] === 255) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]); return seen.size; })()""")
    check(f"{name}: the timeline has {colours} colours", colours > 40)
    text = page.locator("#sample-list").inner_text()
    check(f"{name}: markup in a sample is text", "<script>document.title" in text and "onerror=" in text)
    check(f"{name}: markup in a sample did nothing", page.evaluate("window.widget") is None)
    check(f"{name}: no element came from a sample", page.locator("main script, main img").count() == 0)
    check(f"{name}: the title", "Qwen3-8B" in page.title())


def check_hover(page):
    box = page.locator("#loss svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    readout = page.locator("#loss .readout").inner_text()
    check(f"hover tells values: {readout}", "step" in readout and "smoothed" in readout)
    check("the other curves follow", "step" in page.locator("#lr .readout").inner_text())
    page.mouse.move(5, 5)
    check("and forget", page.locator("#loss .readout").inner_text() == "")
    page.locator("#loss button").click()
    check("log scale", page.locator("#loss button").get_attribute("aria-pressed") == "true")
    page.locator("#loss button").click()
    lanes = page.locator("#lanes")
    lanes.scroll_into_view_if_needed()
    box = lanes.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 15)
    detail = page.locator("#lanes-readout").inner_text()
    check(f"a span tells what it is: {detail}", "stage" in detail and "microbatch" in detail)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 15)
    page.mouse.up()
    check("a range is enlarged", page.locator("#zoom-out").is_visible())
    page.locator("#zoom-out").click()
    check("and left again", not page.locator("#zoom-out").is_visible())


def check_samples(page):
    slider = page.locator("#sample-list input").first
    after = page.locator("#sample-list .after div").first
    newest = after.inner_text()
    slider.evaluate("e => { e.value = 1; e.dispatchEvent(new Event('input')); }")
    check("the slider shows other steps", after.inner_text() != newest)
    page.locator("#settings-box summary").click()
    check("settings unfold", "learning_rate" in page.locator("#settings").inner_text())


def check_long(browser, folder):
    """A hundred thousand steps are drawn and answered at once."""
    subprocess.run(example(folder / "long", 100_000), check=True, stdout=subprocess.DEVNULL)
    url = (folder / "long/report.html").as_uri()
    page = opened(browser, url, url, **VIEWS["light"])
    check_page("long", page)
    for what, call in [("draw everything", "show()"), ("follow the pointer", "point(50000)")]:
        ms = page.evaluate(f"(() => {{ const from = performance.now(); for (let i = 0; i < 5; i++) {call}; return (performance.now() - from) / 5; }})()")
        print(f"100,000 steps: {ms:.1f} ms to {what}")
        check(f"100,000 steps: {ms:.1f} ms to {what}", ms < 400)


def check_odd(browser, folder, images):
    """Runs that are empty, short or broken have a page as well."""
    subprocess.run(example(folder / "odd", "--odd"), check=True, stdout=subprocess.DEVNULL)
    for name in ["empty", "started", "bare", "broken"]:
        for view in ["light", "phone"]:
            url = (folder / f"odd/{name}.html").as_uri()
            page = opened(browser, url, url, **VIEWS[view])
            check_sound(f"{name} {view}", page)
            if images:
                page.screenshot(path=images / f"odd-{name}-{view}.png", full_page=True)
            for button in page.locator("button:visible").all():
                button.click()
            check_sound(f"{name} {view}, after use", page)


def check_live(browser, folder, images):
    server = subprocess.Popen(example(folder / "live", "--serve"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        url = server.stdout.readline().strip()
        host = url.split("/?")[0] + "/"
        for name in ["light", "phone"]:
            page = opened(browser, url, host, **VIEWS[name])
            check_page("live " + name, page)
            check("it says that it trains", page.locator("#state").inner_text() == "training")
            before = page.locator("#where").inner_text()
            deadline = time.time() + 15
            while page.locator("#where").inner_text() == before and time.time() < deadline:
                page.wait_for_timeout(200)
            check("new steps come by themselves", page.locator("#where").inner_text() != before)
            check_page("live later " + name, page)
            if images and name == "phone":
                page.screenshot(path=images / "live-phone.png")
        page = browser.new_context().new_page()
        check("without the token there is nothing", page.goto(host).status == 404)
        page = opened(browser, url, host, **VIEWS["light"])
    finally:
        server.stdin.close()
        server.wait(timeout=30)
    deadline = time.time() + 20
    while page.locator("#state").inner_text() == "training" and time.time() < deadline:
        page.wait_for_timeout(200)
    check("it says that the run is gone", "no connection" in page.locator("#state").inner_text())


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--images", type=pathlib.Path)
    images = arguments.parse_args().images
    if images:
        images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        folder = pathlib.Path(folder)
        subprocess.run(example(folder), check=True, stdout=subprocess.DEVNULL)
        url = (folder / "report.html").as_uri()
        browser = playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), args=FLAGS)
        for name, view in VIEWS.items():
            page = opened(browser, url, url, **view)
            check_page(name, page)
            if images:
                page.screenshot(path=images / f"report-{name}.png", full_page=True)
        page = opened(browser, url, url, **VIEWS["light"])
        check_hover(page)
        check_samples(page)
        check_page("after use", page)
        check_long(browser, folder)
        check_odd(browser, folder, images)
        check_live(browser, folder, images)
        browser.close()
    print(f"{checks} passed, 0 failed")


if __name__ == "__main__":
    main()
