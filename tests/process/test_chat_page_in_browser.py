"""The chat page and the reference of the API in a browser: what a person does there, and what a hostile model can't."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import EngineFault
from baton.messages.adapters import AdapterSource
from baton.messages.node_model import EMBEDS, GENERATES, Capability
from baton.security.http_access import PageAuthenticator
from baton.security.keys import KeyRing, new_key, write_keys
from baton.security.matrix import CallerRole
from baton.text.chat_template import DEFAULT_TEMPLATE
from baton.text.prompts import ImagePrompts
from router.admission.prompt_inputs import ImageRules
from router.http.pages.operations import OPERATIONS
from tests.support.browser import Browser
from tests.support.chat_page import DROP, PASTE, TEMPLATE, opened, text_of
from tests.support.cut_connections import cut_connections_at
from tests.support.http_rig import CARD, chunk, finished
from tests.support.image_models import IMAGE_MODELS, PROCESSORS, random_image
from tests.support.markdown_cases import MARKDOWN_CASES

WITH_IMAGES = (
    "{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"
    "{% endif %}{% endfor %}"
)
HOSTILE = "<img src=x onerror=window.pwned=1><script>window.pwned=1</script> [x](javascript:window.pwned=1)"
MARKDOWN = "# Title\n\n- one\n- **two**\n\n```python\nx = '<b>'\n```\n\n[docs](https://example.org/a)\n\n" + HOSTILE
SIZES = [(1280, "light"), (400, "dark")]
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.mark.parametrize(("width", "scheme"), SIZES)
async def test_an_answer_is_streamed_and_drawn_without_any_markup_of_the_models(
    chromium: Browser, width: int, scheme: str
) -> None:
    async with opened(chromium) as page:
        await page.open(width, scheme)
        await page.read(
            "byId('system').value = 'Be brief.'; byId('temperature').value = '0.5'; byId('seed').value = '7'"
        )
        await page.say(HOSTILE)
        call = await page.rig.next_call()
        assert call.request is not None
        assert text_of(call.request.prompt) == f"<system>Be brief.<user>{HOSTILE}"
        assert (call.request.temperature, call.request.seed, call.request.top_p) == (0.5, 7, None)
        half = len(MARKDOWN) // 2
        call.tell(chunk(0, MARKDOWN[:half]))
        await page.until("document.querySelector('.pending .text h3')")
        assert await page.read("[byId('stop').hidden, byId('send').hidden]") == [False, True]
        call.tell(chunk(half, MARKDOWN[half:]), finished("stop", 42))
        await page.until("!running")
        assert await page.read("document.querySelector('.assistant h3').textContent") == "Title"
        assert await page.read("[...document.querySelectorAll('.assistant li')].map(one => one.textContent)") == [
            "one",
            "two",
        ]
        assert await page.read("document.querySelector('.assistant pre').textContent") == "x = '<b>'"
        assert await page.read("[...document.querySelectorAll('.assistant a')].map(one => one.href)") == [
            "https://example.org/a"
        ]
        assert (await page.read("document.querySelector('.assistant .under').textContent")).startswith("42 tokens, ")
        # What the model and the person wrote is text.
        assert await page.read("document.querySelector('.user .text').textContent") == HOSTILE
        assert HOSTILE in await page.read("document.querySelector('.assistant .text').textContent")
        assert await page.read("window.pwned === undefined && !document.querySelector('main img, main script')")
        assert chromium.complaints == []
        assert chromium.requests == [page.url, f"{page.url}v1/models", f"{page.url}v1/chat/completions"]
        assert await page.read(OVERFLOW) == 0


async def test_a_chat_goes_on_and_an_answer_is_made_again(chromium: Browser) -> None:
    async with opened(chromium) as page:
        await page.open()
        await page.say("a")
        (await page.rig.next_call()).tell(chunk(0, "b"), finished("stop"))
        await page.until("!running")
        await page.say("c")
        call = await page.rig.next_call()
        assert call.request is not None
        assert text_of(call.request.prompt) == "<user>a<assistant>b<user>c"
        call.tell(chunk(0, "d"), finished("length"))
        await page.until("!running")
        assert "ended at max tokens" in await page.read("views.get(chat.turns[3]).under.textContent")
        await page.press("Again", 3)
        again = await page.rig.next_call()
        assert again.request is not None
        assert text_of(again.request.prompt) == "<user>a<assistant>b<user>c"
        again.tell(chunk(0, "e"), finished("stop"))
        await page.until("!running")
        assert await page.read("chat.turns.map(turn => turn.text)") == ["a", "b", "c", "e"]
        await page.read("byId('new').click()")
        assert await page.read("[chat.turns.length, document.querySelectorAll('.turn').length]") == [0, 0]


@pytest.mark.parametrize(
    "script",
    [
        # At once, and grown character by character: the same elements, of which finished ones are not drawn again.
        "drawnAtOnce(text)",
        "drawnInSteps(text)",
    ],
)
async def test_markdown_is_drawn_as_elements(chromium: Browser, script: str) -> None:
    functions = """
      const drawnAtOnce = text => {
        const into = element("div");
        new GrowingMarkdown(into).draw(text);
        return into.innerHTML;
      };
      const drawnInSteps = text => {
        const into = element("div"), final = [], markdown = new GrowingMarkdown(into, node => final.push(node));
        for (let end = 0; end <= text.length; end += 1) markdown.draw(text.slice(0, end));
        return final.every((node, place) => into.childNodes[place] === node) ? into.innerHTML : "drawn again";
      };"""
    async with opened(chromium) as page:
        await page.open()
        cases = json.dumps(list(MARKDOWN_CASES))
        drawn = await page.read(f"(() => {{ {functions} return {cases}.map(text => {script}); }})()")
        expected = [made or found for made, found in zip(MARKDOWN_CASES.values(), drawn, strict=True)]
        assert drawn == expected
        assert all("pwned" not in tag for html in drawn for tag in re.findall("<[^>]*>", html) if "example" not in tag)


async def test_a_conversation_outlives_a_reload_and_is_edited_and_deleted(chromium: Browser) -> None:
    async with opened(chromium, TEMPLATE + "{% if add_generation_prompt %}<new>{% endif %}") as page:
        await page.open()
        await page.read("byId('system').value = 'Be brief.'; byId('temperature').value = '0'")
        await page.say("first question")
        await page.answer("one **two**", "length")
        await page.press("Continue", -1)
        assert await page.answer(" three") == "<system>Be brief.<user>first question<assistant>one **two**"
        await page.say("second")
        call = await page.rig.next_call()
        call.tell(chunk(0, "begun"))
        await page.until("chat.turns[3].text === 'begun'")
        await page.reload()
        assert await page.read("chat.turns.map(turn => turn.text)") == [
            "first question",
            "one **two** three",
            "second",
            "begun",
        ]
        assert await page.read("[byId('system').value, byId('temperature').value]") == ["Be brief.", "0"]
        assert "interrupted" in await page.read("views.get(chat.turns[3]).under.textContent")
        assert await page.read("document.querySelector('.assistant strong').textContent") == "two"
        await page.press("Edit", 0)
        await page.read("document.querySelector('.edit textarea').value = 'better'")
        await page.do(chromium.press, "Enter")
        assert await page.answer("new") == "<system>Be brief.<user>better<new>"
        await page.reload()
        assert await page.read("chat.turns.map(turn => turn.text)") == ["better", "new"]
        assert await page.read("[...byId('chats').querySelectorAll('a')].map(one => one.textContent)") == ["better"]
        assert "## User\n\nbetter\n\n## demo\n\nnew" in await page.read("asMarkdown(chat)")
        await page.read("byId('new').click()")
        await page.until("byId('chats').children.length === 1 && !document.querySelector('[aria-current]')")
        await page.read("byId('chats').querySelector('button').click()")
        assert await page.read("byId('chats').children.length") == 1
        await page.read("byId('chats').querySelector('button').click()")
        await page.until("!byId('chats').children.length")
        await page.reload()
        assert await page.read("[byId('chats').children.length, chat.turns.length]") == [0, 0]


async def test_conversations_that_are_kept_are_bounded(chromium: Browser) -> None:
    async with opened(chromium) as page:
        await page.open()
        kept = """(async () => {
          const bytes = 2 ** 24;
          for (let updated = 1; updated <= 9; updated += 1) {
            await store.save({id: `c${updated}`, title: "t", updated, turns: [{text: "x".repeat(bytes)}]});
          }
          const ids = (await store.heads()).map(head => head.id);
          await store.clear();
          return [...ids, Boolean(await store.load("c9"))];
        })()"""
        assert await page.read(kept) == ["c9", "c8", "c7", "c6", "c5", "c4", "c3", False]


async def test_a_stream_whose_connection_is_lost_goes_on_where_it_was(chromium: Browser) -> None:
    async with opened(chromium) as page:
        await page.open()
        await page.say("a")
        call = await page.rig.next_call()
        call.tell(chunk(0, "ab"))
        await page.until("chat.turns[1].text === 'ab'")
        assert cut_connections_at(page.address) > 0
        again = await page.rig.next_call()
        assert (again.request_id, again.positions) == (call.request_id, (2,))
        again.tell(chunk(2, "c"), finished("stop"))
        await page.until("!running")
        assert await page.read("[chat.turns[1].text, chat.turns[1].end]") == ["abc", "stop"]


async def test_images_are_pasted_and_dropped_within_the_servers_bounds(chromium: Browser, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(IMAGE_MODELS["idefics3"]))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSORS["idefics3"]))
    prompts = ImagePrompts.load(tmp_path)
    assert prompts is not None
    small, wide = random_image(1, 8, 8), random_image(2, 40, 30)
    rules = ImageRules(prompts, most_images=2, most_bytes=len(small) * 2 + len(wide), most_pixels=64)
    card = replace(CARD, capabilities=GENERATES | {Capability.IMAGE})
    async with opened(chromium, WITH_IMAGES, card=card, image_rules=rules) as page:
        await page.open()
        await page.give(PASTE, {"a.png": ("image/png", small), "note.txt": ("text/plain", b"x")})
        await page.until("byId('refused').textContent")
        assert "only PNG, JPEG, WebP and GIF" in await page.read("byId('refused').textContent")
        for file, reason in ((wide, "40 × 30 pixels"), (b"x", "damaged"), (b"x" * 99999, "would have")):
            await page.give(DROP, {"b.png": ("image/png", file)})
            await page.until(f"byId('refused').textContent.includes({json.dumps(reason)})")
        assert await page.read("attachments.files.map(file => file.name)") == ["a.png"]
        await page.say("look")
        call = await page.rig.next_call()
        assert call.request is not None
        assert list(call.request.images) == [small]
        call.tell(chunk(0, "x"), finished("stop"))
        await page.until("!running")
        await page.reload()
        await page.until("document.querySelector('.user img').naturalWidth === 8")
        await page.give(DROP, {"c.png": ("image/png", small), "d.png": ("image/png", small)})
        await page.until("byId('refused').textContent.includes('at most 2 images')")
        assert await page.read("attachments.files.map(file => file.name)") == ["c.png"]
        assert chromium.complaints == []


async def test_only_what_chats_is_offered_and_adapters_beside_their_model(chromium: Browser) -> None:
    async with opened(chromium, card=replace(CARD, capabilities=EMBEDS)) as page:
        await page.open()
        assert "does not chat: it gives vectors" in await page.read("byId('model').textContent")
        assert await page.read("byId('send').disabled")
    adapters = {"sql": AdapterSource("sql", "/srv/sql", "a" * 64)}
    async with opened(chromium, card=replace(CARD, capabilities=GENERATES, adapters=adapters)) as page:
        await page.open()
        assert await page.read("[...byId('models').options].map(one => one.textContent)") == [
            "demo",
            "sql (adapter of demo)",
        ]
        await page.read("byId('models').value = 'sql'; byId('models').onchange()")
        await page.say("a")
        call = await page.rig.next_call()
        assert call.request is not None
        assert call.request.model == "sql"
        call.tell(chunk(0, "x"), finished("stop"))
        await page.until("!running")
        await page.reload()
        assert await page.read("model.id") == "sql"


async def test_reasoning_is_folded_and_not_sent_again_as_text(chromium: Browser) -> None:
    async with opened(chromium, TEMPLATE + "{# </think> #}{% if false %}<think></think>{% endif %}") as page:
        await page.open()
        await page.say("a")
        await page.answer("<think>why</think>so")
        assert await page.read("[chat.turns[1].reasoning, chat.turns[1].text]") == ["why", "so"]
        assert await page.read("document.querySelector('details.reasoning').open") is False
        await page.say("b")
        assert await page.answer("x") == "<user>a<assistant>so<user>b"


async def test_escape_stops_an_answer_at_the_router_too(chromium: Browser) -> None:
    async with opened(chromium) as page:
        await page.open()
        await page.say("a")
        call = await page.rig.next_call()
        call.tell(chunk(0, "begun"))
        await page.until("document.querySelector('.assistant p')")
        await page.do(chromium.press, "Escape")
        await call.is_closed.wait()
        await page.until("!running")
        assert await page.read("chat.turns[1].text") == "begun"
        assert "stopped" in await page.read("views.get(chat.turns[1]).under.textContent")
        assert await page.read("document.querySelectorAll('.error').length") == 0


async def test_an_answer_that_only_repeats_itself_is_stopped_at_the_router_too(chromium: Browser) -> None:
    async with opened(chromium) as page:
        await page.open()
        await page.say("a")
        call = await page.rig.next_call()
        call.tell(chunk(0, "Fine. " * 100))
        await call.is_closed.wait()
        await page.until("!running")
        assert "stopped because it only repeats itself" in await page.read("views.get(chat.turns[1]).under.textContent")
        await page.read("byId('stop_loops').click()")
        await page.say("b")
        call = await page.rig.next_call()
        call.tell(chunk(0, "Fine. " * 100), finished("stop"))
        await page.until("!running")
        assert "repeats" not in await page.read("views.get(chat.turns[3]).under.textContent")


async def test_shift_and_enter_begin_a_line(chromium: Browser) -> None:
    async with opened(chromium) as page:
        await page.open()
        await page.read("byId('prompt').focus()")
        await page.do(chromium.type, "a")
        await page.do(chromium.press, "Enter", True)
        await page.do(chromium.type, "b")
        assert await page.read("[byId('prompt').value, chat.turns.length]") == ["a\nb", 0]


async def test_errors_are_shown_with_their_text(chromium: Browser) -> None:
    async with opened(chromium) as page:
        await page.open()
        await page.read("byId('temperature').value = '9'")
        await page.say("a")
        call = await page.rig.next_call()
        call.tell(EngineFault(f"NaN {HOSTILE}"))
        await page.until("!running")
        assert HOSTILE in await page.read("document.querySelector('.error').textContent")
        await page.say("b")
        # The roles of the next conversation alternate all the same, as templates of many models demand.
        assert await page.read("requestFor(chat, model)[1].messages") == [{"role": "user", "content": "a\n\nb"}]
        (await page.rig.next_call()).tell(chunk(0, "x"), EngineFault("broke in the middle"))
        await page.until("!running")
        assert (
            await page.read("views.get(chat.turns[3]).part.querySelector('.error').textContent")
            == "broke in the middle"
        )
        assert await page.read("chat.turns[3].text") == "x"


async def test_a_model_without_a_template_continues_a_text(chromium: Browser) -> None:
    async with opened(chromium, DEFAULT_TEMPLATE) as page:
        await page.open()
        assert "no chat template" in await page.read("byId('note').textContent")
        for said, answer in (("def f(", "n):"), (" #", " done")):
            await page.say(said)
            call = await page.rig.next_call()
            call.tell(chunk(0, answer), finished("stop"))
            await page.until("!running")
        assert call.request is not None
        assert (call.request.prompt, call.request.max_tokens) == ("def f(n): #", 256)
        assert chromium.requests[-1] == f"{page.url}v1/completions"


async def test_the_page_is_open_and_its_calls_have_the_key_that_was_typed(chromium: Browser, tmp_path: Path) -> None:
    key, entry = new_key("t", CallerRole.CLIENT, "")
    write_keys(tmp_path / "keys", [entry])
    async with opened(chromium, authenticator=PageAuthenticator("127.0.0.1", "", KeyRing(tmp_path / "keys"))) as page:
        await page.open()
        assert "key" in await page.read("byId('model').textContent")
        assert await page.read("byId('send').disabled")
        await page.read(f"byId('key').value = {json.dumps(key)}; byId('key').onchange()")
        await page.until("model")
        await page.say("a")
        (await page.rig.next_call()).tell(chunk(0, "b"), finished("stop"))
        await page.until("!running")
        assert await page.read("chat.turns[1].text") == "b"
        assert await page.read("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]


async def test_a_key_that_is_taken_back_in_mid_use_is_asked_for_again(chromium: Browser, tmp_path: Path) -> None:
    (old, old_entry), (new, new_entry) = (new_key(name, CallerRole.CLIENT, "") for name in ("old", "new"))
    write_keys(tmp_path / "old", [old_entry])
    write_keys(tmp_path / "new", [new_entry])
    authenticator = PageAuthenticator("127.0.0.1", "", KeyRing(tmp_path / "old"))
    async with opened(chromium, authenticator=authenticator) as page:
        await page.open()
        await page.read(f"byId('key').value = {json.dumps(old)}; byId('key').onchange()")
        await page.until("model")
        authenticator._keys = KeyRing(tmp_path / "new")
        await page.read("byId('settings').hidden = true")
        await page.say("a")
        await page.until("!running")
        assert "Type in a key that is valid" in await page.read("document.querySelector('.error').textContent")
        assert "Type in a key that is valid" in await page.read("byId('model').textContent")
        asked = "[byId('settings').hidden, byId('key').ariaInvalid, document.activeElement === byId('key')]"
        assert await page.read(asked) == [False, "true", True]
        await page.read(f"byId('key').value = {json.dumps(new)}; byId('key').onchange()")
        await page.until("byId('key').ariaInvalid === 'false'")
        await page.read("retry(chat.turns[1])")
        (await page.rig.next_call()).tell(chunk(0, "b"), finished("stop"))
        await page.until("!running")
        assert await page.read("chat.turns.map(turn => turn.text)") == ["a", "b"]


@pytest.mark.parametrize(("width", "scheme"), SIZES)
async def test_the_reference_shows_every_path_and_field(chromium: Browser, width: int, scheme: str) -> None:
    async with opened(chromium) as page:
        await page.do(chromium.visit, f"{page.url}docs", width, 860, scheme)
        await page.until("document.querySelector('article')")
        shown = await page.read("[...document.querySelectorAll('article h3')].map(one => one.textContent)")
        assert sorted(shown) == sorted(f"{one.method}{one.path}" for one in OPERATIONS)
        fields = "[...document.querySelectorAll('#post_v1_chat_completions dt code')].map(one => one.textContent)"
        assert {"messages", "temperature", "include_usage"} <= set(await page.read(fields))
        form = await page.read("document.querySelector('#post_v1_audio_transcriptions pre').textContent")
        assert "-F 'file=@speech.wav'" in form
        assert f"curl {page.url}tokenize" in await page.read("document.querySelector('#post_tokenize pre').textContent")
        await page.read("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        assert await page.read(OVERFLOW) == 0
        assert chromium.complaints == []
        assert chromium.requests == [f"{page.url}docs", f"{page.url}openapi.json"]
