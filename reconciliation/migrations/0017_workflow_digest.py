from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("reconciliation", "0016_owners_and_currencies"),
    ]

    operations = [
        # Runs that are open now began before there was a digest, and are not checked.
        migrations.AddField(
            model_name="run",
            name="workflow_digest",
            field=models.CharField(default="", max_length=64),
        ),
    ]
