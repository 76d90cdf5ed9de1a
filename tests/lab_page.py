"""The lab's page in a browser, as a user handles it."""

from contextlib import contextmanager

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import sinklens
from sinklens.views.html import visible

PROMPT = "Question: Tom has 5 apples. He buys 7 more. How many apples does Tom have now?\nAnswer:"
SHORT = {"gen_length": 8}
MENU = "return [...document.querySelectorAll('#menu button')].map(item => item.textContent)"
ENDED = (
    "!document.body.dataset.pending && (document.body.dataset.shown || '').endsWith('done') && "
    "document.getElementById('halt').disabled"
)


class Page:
    """The lab in the browser, as a user handles it."""

    def __init__(self, browser, lab, width=1440):
        self.browser, self.lab = browser, lab
        browser.driver.get(f"{lab.address}static/lab.css")
        browser.driver.execute_async_script(
            "const [token, done] = arguments; "
            "fetch('/', { method: 'POST', body: new URLSearchParams({ token }) }).then(() => done())",
            lab.token,
        )
        self.open(lab.address, width)

    def open(self, address, width=1440):
        self.browser.size(width)
        self.browser.driver.get("about:blank")  # the last page writes to the logs until it is left
        self.browser.driver.get_log("browser"), self.browser.driver.get_log("performance")
        self.browser.driver.get(address)
        self.browser.wait("return document.body.dataset.ready")
        return self

    def fresh(self):
        """Forget what the tab shows, for good."""
        self.browser.js("sessionStorage.clear(); Storage.prototype.setItem = () => {}")
        return self

    def unfold(self):
        """Open the forms that are one line."""
        self.browser.js("document.querySelectorAll('.folded > .head [aria-expanded]').forEach((node) => node.click())")
        return self

    def without_changes(self):
        """Remove the changes and settings that the newest run brought along.

        In one script: fewer changes would be run as B.
        """
        self.browser.js(
            "document.getElementById('same').checked = false; document.getElementById('model-b').value = ''; "
            "document.getElementById('model-name').dispatchEvent(new Event('change')); "
            "const remove = '#chips [aria-label^=Remove]'; "
            "while (document.querySelector(remove)) document.querySelector(remove).click()"
        )
        return self

    def type(self, prompt):
        self.unfold()
        box = self.browser.driver.find_element(By.ID, "prompt")
        self.browser.js("arguments[0].value = ''", box)
        box.send_keys(prompt)

    def submit(self):
        """Run what is typed, from the keyboard."""
        self.browser.driver.find_element(By.ID, "prompt").send_keys(Keys.CONTROL, Keys.ENTER)

    def run(self, prompt=PROMPT, **settings):
        """Run a prompt as A, without changes, with these settings."""
        self.without_changes()
        self.unfold()
        for name, value in settings.items():
            self.browser.js(
                f"document.querySelector('#settings-fields [data-name={name}] input').value = arguments[0]", value
            )
        self.browser.choose("source", "text")  # the newest run may have been one of token ids
        self.type(prompt)
        self.browser.click("run")
        run = self.ended("A")
        self.unfold()
        return run

    def waits_after(self, steps):
        """Wait until the page shows these steps of its newest run, not of an earlier one with as many."""
        self.browser.wait(
            "const { shown, wanted, pending, steps } = document.body.dataset; "
            f"return !pending && shown === `${{wanted}}/live` && steps === '{steps}' && "
            "!document.getElementById('halt').disabled"
        )

    def ended(self, slot):
        """Wait until the page shows the finished run of `slot`; returns its id."""
        self.browser.wait(
            f"return {ENDED} && document.getElementById('show-{slot}').ariaPressed === 'true' && "
            "document.body.dataset.shown.split('/')[0] === document.body.dataset.wanted"
        )
        return self.browser.js("return document.body.dataset.shown.split('/')[0]")

    def compared(self):
        """Wait for the comparison of the runs shown, its divergence included."""
        self.ended("B")
        self.browser.wait(
            "const card = document.getElementById('compare'); return !card.hidden && card.ariaBusy === 'false' && "
            "card.dataset.pair.endsWith(document.body.dataset.wanted) && card.dataset.measured === card.dataset.pair"
        )

    def pick(self, text):
        """Choose an entry of the open menu."""
        assert any(text in item for item in self.browser.js(MENU)), self.browser.js(MENU)
        self.browser.js(
            "[...document.querySelectorAll('#menu button')].find(n => n.textContent.includes(arguments[0])).click()",
            text,
        )

    def choose_head(self, layer, head, text):
        self.browser.point("grid", layer, head, click=True)
        self.pick(text)

    def go_to(self, step):
        self.browser.js(
            "const s = document.getElementById('step'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))",
            step,
        )

    def tokens(self):
        return self.browser.js("return [...document.querySelectorAll('#tokens .tok')].map(t => t.textContent)")

    def differing(self):
        return self.browser.js("return [...document.querySelectorAll('#tokens .tok.differs')].map(t => +t.dataset.at)")

    def chips(self):
        return self.browser.js("return [...document.querySelectorAll('#chips .said')].map(n => n.textContent)")

    def python(self):
        self.browser.click("copy-python")
        text = self.browser.wait("return document.getElementById('code').value")
        self.browser.js("document.getElementById('code-dialog').close(); document.getElementById('code').value = ''")
        return text

    def quiet(self):
        assert self.browser.js("return document.getElementById('trouble').hidden"), self.browser.text("trouble")
        assert self.browser.complaints() == []


def shown_at_end(run):
    """The texts of a run's last canvas, as a page shows them."""
    words = run.sinks.vocabulary
    return [visible(words[token]) for token in run.canvas[0, -1].tolist()]


@contextmanager
def visited(browser, *models, **given):
    """The page of a lab of its own, which the browser leaves before the lab closes."""
    with sinklens.lab(*models, **given) as lab:
        page = Page(browser, lab)
        yield page
        page.fresh()
        browser.driver.get("about:blank")
