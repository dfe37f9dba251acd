"""Clients of AgentGym's servers whose actions are calls of tools: weather, movie, academia, todo, sheet."""

from __future__ import annotations

from typing import Any, ClassVar

from agentgym_rl.client.bare import BareClient

_FORM = 'Reach the goal with the tools, one call a turn, written as: <tool> with Action Input: {"<name>": <value>}'


def _described(*lines: str) -> str:
    return "\n".join((_FORM, "Tools:", *lines))


class ToolClient(BareClient):
    """The server gets the whole turn, in which it looks for the call."""

    action_forms = ("<tool> with Action Input: {...}",)
    create_fields: ClassVar[dict[str, Any]] = {"id": 0}
    example_action = "check_valid_actions with Action Input: {}"


class WeatherClient(ToolClient):
    """Reward of the final answer."""

    task = "weather"
    task_description = _described(
        "get_user_current_date(), get_user_current_location()",
        "get_latitude_longitude(name): always look a place's coordinates up",
        "get_current_temp, get_current_rain, get_current_snow (latitude, longitude, current_date)",
        "get_temp_forecast, get_rain_forecast, get_snow_forecast (latitude, longitude, start_date, end_date)",
        "get_historical_temp, get_historical_rain, get_historical_snow, get_historical_air_quality_index "
        "(latitude, longitude, start_date, end_date)",
        "get_current_air_quality_index(latitude, longitude, current_date), get_air_quality_level(air_quality_index)",
        "get_elevation(latitude, longitude), get_distance(latitude1, longitude1, latitude2, longitude2): km",
        "check_valid_actions(), finish(answer)",
        "Dates are YYYY-MM-DD.",
    )


class MovieClient(ToolClient):
    """Reward of the final answer."""

    task = "movie"
    task_description = _described(
        "get_search_movie(movie_name), get_search_person(person_name): always look ids up",
        "get_movie_details: budget, genres, revenue, vote average, release date; get_movie_production_companies, "
        "get_movie_production_countries, get_movie_cast, get_movie_crew, get_movie_keywords, "
        "get_movie_alternative_titles, get_movie_translation (movie_id)",
        "get_person_details: biography, birthday, place of birth; get_person_cast, get_person_crew: films; "
        "get_person_external_ids (person_id)",
        "check_valid_actions(), finish(answer)",
    )


class AcademiaClient(ToolClient):
    """Reward of the final answer."""

    task = "academia"
    task_description = _described(
        "loadPaperNet(), loadAuthorNet(): call one of them first",
        "neighbourCheck(graph, node): papers cited (graph PaperNet) or collaborators (graph AuthorNet)",
        "paperNodeCheck(node): authors, year, venue, citations, keywords of a paper",
        "authorNodeCheck(node): name and organisation; authorEdgeCheck(node1, node2): papers of both authors",
        "finish(answer)",
    )
    example_action = "loadPaperNet with Action Input: {}"


class TodoClient(ToolClient):
    """Reward of the final answer or state."""

    task = "todo"
    task_description = _described(
        "get_user_current_date(), get_user_current_location()",
        "get_projects(), get_tasks(project_id): always look ids up",
        "get_task_description, get_task_duration, complete_task, delete_task (task_id)",
        "update_project(project_id, is_favorite): True or False; update_task(task_id, due_date)",
        "check_valid_actions(), finish(answer): done, where nothing was asked",
    )


class SheetClient(ToolClient):
    """Reward of the final state of the sheet."""

    task = "sheet"
    task_description = _described(
        "open_sheet(name): call it first; del_sheet(name)",
        "get_all_values(), get_range_values(start_position, end_position), get_cell_value(position), "
        "get_note(position), get_A1_annotation(row, col), filter_cells(query, in_row, in_column)",
        "get_value_by_formula(start_position, end_position, position_list, operator), update_cell_by_formula("
        "start_position, end_position, position_list, result_position, operator): a range or a list; SUM, AVERAGE, "
        "COUNT, MAX, MIN, MINUS, PRODUCT",
        "update_cell(position, value), update_range(start_position, end_position, values_list), "
        "update_note(position, content)",
        "insert_cols(values_list, col_idx), insert_rows(values_list, row_idx), delete_batch_data(dimension, "
        "index_list): dimension row or col",
        "freeze_data(dimension, num): rows or columns; sort_sheet_by_col(col_num, order): asc or des, after the first "
        "row is frozen; merge_cells(start_position, end_position)",
        "finish()",
        "Positions are like B2; rows and columns count from 1.",
    )
    example_action = "get_all_values with Action Input: {}"
