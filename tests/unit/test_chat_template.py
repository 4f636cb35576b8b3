"""Chat templates are strangers' programs: right on what real ones do, and bounded on what they might."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from relevo.core.errors import ModelFileError
from relevo.models import chat_template
from relevo.models.chat_template import CHATML, ChatTemplate, Habits, RenderRefused, choose_template
from relevo.models.messages import prepare_messages

NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
USER = [{"role": "user", "content": 'Hi <b>&"é"'}]


def render(source: str, messages: list[Any] | None = None, **options: Any) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages or USER, now=NOW, **options)


def refused(source: str, messages: list[Any] | None = None, **options: Any) -> RenderRefused:
    with pytest.raises(RenderRefused) as caught:
        render(source, messages, **options)
    return caught.value


def test_chatml_is_rendered_to_the_letter() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    assert render(CHATML, messages) == (
        '<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b>&"é"<|im_end|>\n<|im_start|>assistant\n'
    )


def test_blocks_are_trimmed_as_the_templates_authors_saw_it() -> None:
    source = "{{ bos_token }}\n  {% for m in messages %}\n{{ m.content }}\n  {% endfor %}\nend{{ eos_token }}"
    assert render(source, [{"role": "user", "content": "x"}]) == "<s>\nx\nend</s>"


def test_json_in_a_prompt_is_plain_json_in_its_own_order() -> None:
    tools = [{"type": "function", "function": {"name": "z", "a": "<é'>"}}]
    assert render("{{ tools | tojson }}", tools=tools) == (
        '[{"type": "function", "function": {"name": "z", "a": "<é\'>"}}]'
    )
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}") == '{\n "b": 1,\n "a": [\n  2\n ]\n}'


def test_the_time_is_the_one_passed_in() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "04 Mar 2026"


def test_loop_controls_and_generation_blocks_are_known() -> None:
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("a{% generation %}b{{ 1 }}{% endgeneration %}c") == "ab1c"


def test_variables_reach_the_template_but_cannot_replace_its_surroundings() -> None:
    assert render("{{ enable_thinking }}", variables={"enable_thinking": False}) == "False"
    assert render("{{ add_generation_prompt }}", variables={"add_generation_prompt": False}) == "False"
    error = refused("x", variables={"messages": []})
    assert (error.code, "messages" in error.message) == ("invalid", True)


def test_a_complaint_of_the_template_is_passed_on_in_its_words() -> None:
    error = refused("{{ raise_exception('Roles must alternate') }}")
    assert error.code == "template"
    assert "Roles must alternate" in error.message


def test_a_failing_template_says_what_failed() -> None:
    error = refused("{{ messages[0].content + 1 }}")
    assert error.code == "template"
    assert "TypeError" in error.message


def test_a_template_that_is_not_jinja_is_refused_at_the_start_with_its_line() -> None:
    with pytest.raises(ModelFileError, match=r"line 2.*chat_template"):
        ChatTemplate("fine\n{% for %}")
    with pytest.raises(ModelFileError, match="larger"):
        ChatTemplate("x" * (2**20 + 1))
    with pytest.raises(ModelFileError):
        ChatTemplate("{{ " + "(" * 5000 + ")" * 5000 + " }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ self.__init__.__globals__ }}",
        "{{ ('{0.__class__.__mro__}').format(messages) }}",
        "{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}",
        "{{ strftime_now.__self__.__class__.__mro__ }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ 9 ** 99999999 }}",
        "{{ 'a' * 99999999999 }}",
        "{{ 99999999999 * [1] }}",
        "{% set x = namespace(v=3) %}{% for i in range(60) %}{% set x.v = x.v * x.v %}{% endfor %}{{ x.v }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 999999999) }}",
        "{{ range(99999999) | list | length }}",
    ],
)
def test_no_template_gets_out_of_its_sandbox(source: str) -> None:
    assert refused(source).code in ("template", "too_large")


def test_output_is_bounded_while_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_OUTPUT_CHARACTERS", 1000)
    assert len(render("{% for i in range(1000) %}x{% endfor %}")) == 1000
    assert refused("{% for i in range(1001) %}x{% endfor %}").code == "too_large"


def test_the_conversation_is_not_changed_by_rendering() -> None:
    messages = [{"role": "user", "content": "x"}]
    render("{% set messages = messages + [1] %}{{ messages | length }}", messages)
    assert messages == [{"role": "user", "content": "x"}]


# ---------------------------------------------------------------- which template


def test_the_configured_template_wins_over_the_files_and_that_over_the_generic() -> None:
    def shown(own: str | None, override: str | None, tokens: bool) -> str | None:
        chosen = choose_template(own, override, has_token=lambda _: tokens)
        return chosen and chosen.render(USER, now=NOW)

    assert shown("own", "mine", True) == "mine"
    assert shown("own", None, True) == "own"
    assert (shown(None, None, True) or "").startswith("<|im_start|>user")
    assert shown(None, None, False) is None


def test_the_digest_names_the_template() -> None:
    assert ChatTemplate("a").digest != ChatTemplate("b").digest
    assert ChatTemplate("a").digest == ChatTemplate("a").digest


# ---------------------------------------------------------------------- messages


def prepare(messages: list[Any], habits: Habits | None = None) -> list[dict[str, Any]]:
    return prepare_messages(messages, habits or Habits())


def test_text_parts_are_joined_and_other_fields_kept() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "input_text", "text": "two"}]
    assert prepare([{"role": "user", "content": parts, "name": "Ada"}]) == [
        {"role": "user", "content": "one two", "name": "Ada"}
    ]


def test_an_image_is_refused_with_what_it_needs() -> None:
    with pytest.raises(RenderRefused, match="projector") as caught:
        prepare([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}])
    assert caught.value.code == "invalid"
    assert "messages[0].content[0]" in caught.value.message


@pytest.mark.parametrize(
    "message",
    [
        "hello",
        {},
        {"role": 3, "content": "x"},
        {"role": "", "content": "x"},
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": 7},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": ["text"]}]},
        {"role": "user", "content": [3]},
        {"role": "assistant", "content": "x", "tool_calls": {}},
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {}}]},
        {"role": "assistant", "content": "x", "tool_calls": ["f"]},
    ],
)
def test_a_malformed_message_is_refused_with_its_place(message: Any) -> None:
    with pytest.raises(RenderRefused, match=r"messages\[1\]") as caught:
        prepare([{"role": "user", "content": "ok"}, message])
    assert caught.value.code == "invalid"


def test_no_messages_are_refused() -> None:
    with pytest.raises(RenderRefused, match="at least one"):
        prepare([])


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def test_tool_calls_take_the_form_the_template_knows() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    (as_object,) = prepare([message])
    assert as_object["content"] is None
    assert as_object["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    (as_text,) = prepare([message], Habits(argument_objects=False, null_content=False))
    assert as_text["content"] == ""
    assert as_text["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'
    assert message["tool_calls"] == [CALL]
    assert CALL["function"]["arguments"] == '{"x": 1}'


def test_arguments_that_are_no_object_stay_as_the_model_wrote_them() -> None:
    broken = {**CALL, "function": {"name": "f", "arguments": "{oops"}}
    (message,) = prepare([{"role": "assistant", "content": "", "tool_calls": [broken]}])
    assert message["tool_calls"][0]["function"]["arguments"] == "{oops"


def test_the_developer_role_is_system_where_the_template_does_not_know_it() -> None:
    message = {"role": "developer", "content": "x"}
    assert prepare([message], Habits(developer_role=False))[0]["role"] == "system"
    assert prepare([message])[0]["role"] == "developer"
    assert ChatTemplate(CHATML).habits.developer_role is False


def test_a_system_text_goes_before_the_user_where_the_template_refuses_the_role() -> None:
    gemma = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    habits = ChatTemplate(gemma).habits
    assert habits.system_role is False
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": "Z"},
    ]
    assert [m["content"] for m in prepare(chat, habits)] == ["Be brief.\n\nHi", "Z"]
    assert len(prepare(chat, ChatTemplate(CHATML).habits)) == 3


def test_no_tools_are_an_empty_list_for_templates_that_walk_over_them() -> None:
    source = "{% for tool in tools %}{{ tool.name }}{% endfor %}{{ messages | length }}"
    assert ChatTemplate(source).habits.null_tools is False
    assert render(source) == "1"
    assert ChatTemplate(CHATML).habits.null_tools is True


def test_what_map_leaves_behind_is_json_too() -> None:
    assert render("{{ messages | map(attribute='role') | tojson }}") == '["user"]'


def test_a_templates_habits_are_found_by_trying() -> None:
    strings = ChatTemplate(
        "{% for m in messages %}{{ m.content + '' }}"
        "{% for c in m.tool_calls %}{{ c.function.arguments + '' }}{% endfor %}{% endfor %}"
    )
    assert (strings.habits.null_content, strings.habits.argument_objects) == (False, False)
    objects = ChatTemplate(
        "{% for m in messages %}{% if m.content is none %}call{% else %}{{ m.content }}{% endif %}"
        "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    assert (objects.habits.null_content, objects.habits.argument_objects) == (True, True)
    printing = ChatTemplate(
        "{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    assert (printing.habits.null_content, printing.habits.argument_objects) == (False, False)
    assert ChatTemplate("{{ raise_exception('never') }}").habits == Habits(null_content=False, developer_role=False)
