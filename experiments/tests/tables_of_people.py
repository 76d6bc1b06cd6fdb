"""Made-up lines of the census tables and of COMPAS, in the official layouts."""

ADULT_ROW = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, ?, Not-in-family, White, Male, 2174, 0, 40, Atlantis"
)
CENSUS_ROW = (
    "73, Private, 4, 34, High school graduate, 0, Not in universe, Widowed, Construction, Sales, White, All other, "
    "Female, Not in universe, Not in universe, Full-time schedules, 0, 0, 20, Nonfiler, Not in universe, "
    "Not in universe, Householder, Householder, 1700.09, ?, ?, ?, Not in universe under 1 year old, ?, 0, "
    "Not in universe, United-States, Mexico, United-States, Native- Born in the United States, 0, "
    "Not in universe, 2, 52, 95"
)
COMPAS_COLUMNS = (
    "id", "name", "sex", "age", "age_cat", "race", "juv_fel_count", "decile_score", "juv_misd_count",
    "juv_other_count", "priors_count", "c_charge_degree", "c_charge_desc", "two_year_recid",
)  # fmt: skip


def adult_lines(rows, income):
    """Adults who differ by age and sex."""
    return [
        ADULT_ROW.replace("39", str(20 + row % 60), 1).replace("Male", ("Male", "Female")[row % 2])
        + f", {income}"
        for row in range(rows)
    ]


def census_lines(rows):
    """People who differ by age, every second with a high income."""
    return [
        CENSUS_ROW.replace("73", str(20 + row % 60), 1) + (", 50000+." if row % 2 else ", - 50000.")
        for row in range(rows)
    ]


def compas_rows(rows):
    """Defendants, every second charged again."""
    same = {"name": "nobody", "sex": "Male", "age_cat": "25 - 45", "race": "Other", "decile_score": "5"}
    counts = dict.fromkeys(("juv_fel_count", "juv_misd_count", "juv_other_count"), "0")
    return [
        {
            **same,
            **counts,
            "id": str(row + 1),
            "age": str(20 + row % 40),
            "priors_count": str(row % 7),
            "c_charge_degree": "FM"[row % 2],
            "c_charge_desc": f"charge, {row % 9}",
            "two_year_recid": str(row % 2),
        }
        for row in range(rows)
    ]
